// The JSON scanner and the string decoder, written over the masks of block.h: one source for all instruction sets.
//
// A string is scanned in blocks of 64 bytes. Each block yields masks of quotes, backslashes, control characters and
// bytes >= 0x80. Few branches depend on the text, because where escapes stand cannot be predicted: escapes are found
// and checked by arithmetic on the masks in every block, UTF-8 likewise in blocks that have it. For UTF-8 the set of
// continuation bytes must equal the set of bytes that the lead bytes call for, and the bytes after E0, ED, F0, F4 must
// lie in their narrower ranges (Unicode 15, table 3-7). Only \u escapes are taken one by one.

#define DS4_EVEN UINT64_C(0x5555555555555555)

// The backslashes that begin an escape: in a run of them every other one, from the first. A carry through the runs
// that begin at even positions tells these runs from the others.
static inline uint64_t DS4_FN(escape_starts)(uint64_t slashes) {
  const uint64_t begins = slashes & ~(slashes << 1);
  const uint64_t in_even = slashes & ~(slashes + (begins & DS4_EVEN));
  return (in_even & DS4_EVEN) | (slashes & ~in_even & ~DS4_EVEN);
}

#if defined(DS4_ISA_AVX512)

// Bytes below 0x80 through a table of 128 entries.
static inline __m512i DS4_FN(lookup)(const uint8_t* table, __m512i v) {
  return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), v, _mm512_loadu_si512(table + 64));
}

// What the byte after a backslash means, itself if it is no letter of a short escape.
static const uint8_t DS4_FN(meaning)[128] = {
    0,   1,   2,   3,   4,   5,   6,   7,   8,   9,   10,  11,  12,  13,  14,  15,  16,  17,  18,  19,  20,  21,
    22,  23,  24,  25,  26,  27,  28,  29,  30,  31,  ' ', '!', '"', '#', '$', '%', '&', 39,  '(', ')', '*', '+',
    ',', '-', '.', '/', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', ':', ';', '<', '=', '>', '?', '@', 'A',
    'B', 'C', 'D', 'E', 'F', 'G', 'H', 'I', 'J', 'K', 'L', 'M', 'N', 'O', 'P', 'Q', 'R', 'S', 'T', 'U', 'V', 'W',
    'X', 'Y', 'Z', '[', 92,  ']', '^', '_', '`', 'a', 8,   'c', 'd', 'e', 12,  'g', 'h', 'i', 'j', 'k', 'l', 'm',
    10,  'o', 'p', 'q', 13,  's', 9,   'u', 'v', 'w', 'x', 'y', 'z', '{', '|', '}', '~', 127};

static const uint8_t DS4_FN(brief)[128] = {['"'] = 1, ['\\'] = 1, ['/'] = 1, ['b'] = 1,
                                           ['f'] = 1, ['n'] = 1,  ['r'] = 1, ['t'] = 1};

// Those of the bytes in `e` that no short escape ends in.
static inline uint64_t DS4_FN(not_brief)(DS4_FN(block) v, uint64_t e) {
  return e & ~(_mm512_test_epi8_mask(DS4_FN(lookup)(DS4_FN(brief), v), _mm512_set1_epi8(1)) & ~DS4_FN(ge)(v, 0x80));
}

#else

static inline uint64_t DS4_FN(not_brief)(DS4_FN(block) v, uint64_t e) {
  if (e == 0) return 0;
  return e & ~(DS4_FN(eq)(v, '"') | DS4_FN(eq)(v, '\\') | DS4_FN(eq)(v, '/') | DS4_FN(eq)(v, 'b') | DS4_FN(eq)(v, 'f') |
               DS4_FN(eq)(v, 'n') | DS4_FN(eq)(v, 'r') | DS4_FN(eq)(v, 't'));
}

#endif

typedef struct {
  const uint8_t* quote;  // the closing one
  int64_t chars;
  unsigned width;
  unsigned flags;
} DS4_FN(string);

// Checks the \u escape whose backslash is at `at`. Gives the bytes that are no characters of their own, and the width;
// `low_half` is the backslash of a low surrogate that the last escape took along.
static inline int DS4_FN(unicode_escape)(const uint8_t* at, const uint8_t* limit, const uint8_t** low_half,
                                         int64_t* saved, unsigned* width) {
  const int32_t unit = limit - at >= 6 ? ds4_hex4(at + 2) : -1;
  if (unit < 0) return 0;
  unsigned w = unit < 0x80 ? DS4_ASCII : unit < 0x100 ? DS4_LATIN1 : DS4_UCS2;
  *saved += 5;
  if (at == *low_half) {
    *saved += 1;
  } else if (unit >= 0xD800 && unit <= 0xDFFF) {
    int length;
    if (ds4_json_unescape(at, limit, &length) > 0xFFFF) {
      *low_half = at + 6;
      w = DS4_UCS4;
    }
  }
  if (w > *width) *width = w;
  return 1;
}

// Scans the string whose first byte after the opening quote is `begin`.
static ds4_json_error DS4_FN(scan_string)(const uint8_t* begin, const uint8_t* limit, DS4_FN(string) * out,
                                          int64_t* steps, const uint8_t** fault) {
  // Most strings are names and short plain values. Where a guess ("it ends in this block and is plain") is right, the
  // next token need not wait for the arithmetic on escapes.
  if (limit - begin >= 64) {
    const DS4_FN(block) v = DS4_FN(load)(begin);
    const uint64_t quotes = DS4_FN(eq)(v, '"');
    const uint64_t special = DS4_FN(eq)(v, '\\') | ~DS4_FN(ge)(v, 0x20) | DS4_FN(ge)(v, 0x80);
    if (quotes != 0 && ((quotes ^ (quotes - 1)) & special) == 0) {
      ++*steps;
      out->chars = __builtin_ctzll(quotes);
      out->quote = begin + out->chars;
      out->width = DS4_ASCII;
      out->flags = 0;
      return DS4_JSON_OK;
    }
  }
  const uint8_t* p = begin;
  const uint8_t* low_half = NULL;
  int64_t saved = 0;  // bytes that are no characters of their own
  unsigned width = DS4_ASCII, flags = 0;
  uint64_t any_escaped = 0;
  uint64_t seen_high = 0;  // once there was a byte >= 0x80, all blocks are checked for UTF-8: a branch that is foreseen
  uint64_t escaped_first = 0;  // 1 if this block's first byte is the escaped one of an escape begun in the last block
  uint64_t due = 0, due_e0 = 0, due_ed = 0, due_f0 = 0, due_f4 = 0;  // what the last block's lead bytes call for
  for (;; p += 64) {
    const int64_t left = limit - p;
    ++*steps;
    if (left <= 0) {
      *fault = begin - 1;
      return DS4_JSON_UNTERMINATED;
    }
    const uint64_t valid = left >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << left) - 1;
    const DS4_FN(block) v = left >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, left);
    const uint64_t slashes = DS4_FN(eq)(v, '\\') & ~escaped_first;
    const uint64_t starts = DS4_FN(escape_starts)(slashes);
    const uint64_t escaped = starts << 1 | escaped_first;
    escaped_first = starts >> 63;
    const uint64_t quotes = DS4_FN(eq)(v, '"') & ~escaped;
    const uint64_t control = ~DS4_FN(ge)(v, 0x20) & valid;
    const uint64_t high = DS4_FN(ge)(v, 0x80);
    const uint64_t until = quotes != 0 ? quotes ^ (quotes - 1) : valid;  // through the closing quote
    const uint64_t e = escaped & until;
    const uint64_t unicode = DS4_FN(eq)(v, 'u') & e;
    const uint64_t wrong_escape = DS4_FN(not_brief)(v, e & ~unicode);
    uint64_t wrong = 0;
    seen_high |= high & until;
    if ((seen_high | due) != 0) {
      const uint64_t c0 = DS4_FN(ge)(v, 0xC0), c2 = DS4_FN(ge)(v, 0xC2), c4 = DS4_FN(ge)(v, 0xC4);
      const uint64_t e0 = DS4_FN(ge)(v, 0xE0), f0 = DS4_FN(ge)(v, 0xF0), f5 = DS4_FN(ge)(v, 0xF5);
      const uint64_t a0 = DS4_FN(ge)(v, 0xA0), b90 = DS4_FN(ge)(v, 0x90);
      const uint64_t continuation = high & ~c0;
      // Leads of two bytes or more, three or more, four.
      const uint64_t lead2 = c2 & ~f5 & until, lead3 = e0 & ~f5 & until, lead4 = f0 & ~f5 & until;
      const uint64_t is_e0 = DS4_FN(eq)(v, 0xE0) & until, is_ed = DS4_FN(eq)(v, 0xED) & until;
      const uint64_t is_f0 = DS4_FN(eq)(v, 0xF0) & until, is_f4 = DS4_FN(eq)(v, 0xF4) & until;
      const uint64_t called = lead2 << 1 | lead3 << 2 | lead4 << 3 | due;
      wrong = (called ^ continuation) | (c0 & ~c2) | f5;
      wrong |= (is_e0 << 1 | due_e0) & ~a0;
      wrong |= (is_ed << 1 | due_ed) & a0;
      wrong |= (is_f0 << 1 | due_f0) & ~b90;
      wrong |= (is_f4 << 1 | due_f4) & b90;
      due = lead2 >> 63 | lead3 >> 62 | lead4 >> 61;
      due_e0 = is_e0 >> 63;
      due_ed = is_ed >> 63;
      due_f0 = is_f0 >> 63;
      due_f4 = is_f4 >> 63;
      saved += __builtin_popcountll(continuation & until);
      flags |= (high & until) != 0 ? DS4_WIDE : 0;
      unsigned w = (high & until) != 0 ? DS4_LATIN1 : DS4_ASCII;
      w = (c4 & until) != 0 ? DS4_UCS2 : w;
      w = lead4 != 0 ? DS4_UCS4 : w;
      width = w > width ? w : width;
    }
    const uint64_t refused = (wrong | control | wrong_escape) & until;
    if (refused != 0) {
      const uint64_t first = refused & -refused;
      *fault = p + __builtin_ctzll(refused);
      if ((first & control) != 0) return DS4_JSON_CONTROL;
      if ((first & wrong) != 0) return DS4_JSON_UTF8;
      --*fault;
      return DS4_JSON_ESCAPE;
    }
    saved += __builtin_popcountll(e & ~unicode);
    any_escaped |= e;
    for (uint64_t rest = unicode; rest != 0; rest &= rest - 1) {
      const uint8_t* at = p + __builtin_ctzll(rest) - 1;
      if (!DS4_FN(unicode_escape)(at, limit, &low_half, &saved, &width)) {
        *fault = at;
        return DS4_JSON_HEX;
      }
    }
    if (quotes != 0) {
      out->quote = p + __builtin_ctzll(quotes);
      out->chars = out->quote - begin - saved;
      out->width = width;
      out->flags = flags | (any_escaped != 0 ? DS4_ESCAPED : 0);
      return DS4_JSON_OK;
    }
  }
}

static inline const uint8_t* DS4_FN(skip_space)(const uint8_t* p) {
  while (*p <= ' ' && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) ++p;
  return p;
}

// Number grammar of RFC 8259 section 6. Returns the end, NULL if it is none. The 0 behind the body stops every loop.
static inline const uint8_t* DS4_FN(scan_number)(const uint8_t* p, unsigned* flags) {
  *flags = 0;
  if (*p == '-') ++p;
  if (*p == '0') {
    ++p;
  } else {
    if (*p < '1' || *p > '9') return NULL;
    do ++p;
    while (*p >= '0' && *p <= '9');
  }
  if (*p == '.') {
    *flags = DS4_FLOAT;
    ++p;
    if (*p < '0' || *p > '9') return NULL;
    do ++p;
    while (*p >= '0' && *p <= '9');
  }
  if ((*p | 32) == 'e') {
    *flags = DS4_FLOAT | DS4_EXPONENT;
    ++p;
    if (*p == '+' || *p == '-') ++p;
    if (*p < '0' || *p > '9') return NULL;
    do ++p;
    while (*p >= '0' && *p <= '9');
  }
  return p;
}

// Fills the tape, which begins as zeros or as `ds4_json_resume` left it, from the body. On an error sets error and
// error_at and leaves the frames of the open containers.
static int DS4_FN(json_scan)(ds4_json_tape* t) {
  const uint8_t* const body = t->body;
  const uint8_t* const limit = body + t->size;
  const uint8_t* p = body;
  uint64_t* words = t->words;
  int64_t n = 0, capacity = t->capacity, steps = 0;
  int depth = 0;
  ds4_json_frame* top = t->frames;  // the innermost open container, if any is
  ds4_json_error error = DS4_JSON_OK;
  const uint8_t* fault = NULL;
  DS4_FN(string) s;
  int is_name = 0;

  if (t->depth > 0) {
    depth = t->depth;
    top = &t->frames[depth - 1];
    n = t->n;
    p = body + t->at;
    goto after;
  }
  p = DS4_FN(skip_space)(p);
  if (p == limit) {
    fault = body;
    error = DS4_JSON_EMPTY;
    goto done;
  }
  if (t->size >= 3 && memcmp(body, "\xEF\xBB\xBF", 3) == 0) {
    fault = body;
    error = DS4_JSON_BOM;
    goto done;
  }

value:
  ++steps;
  if (capacity - n < 4) {
    // Requests have about one word for every 32 bytes.
    const int64_t more = capacity + capacity / 2 + (capacity == 0 ? t->size / 32 : 0) + 64;
    uint64_t* grown = (uint64_t*)realloc(words, (size_t)more * sizeof *words);
    if (grown == NULL) {
      fault = p;
      error = DS4_JSON_MEMORY;
      goto done;
    }
    words = grown;
    capacity = more;
  }
  switch (*p) {
    case '"':
    string:
      error = DS4_FN(scan_string)(p + 1, limit, &s, &steps, &fault);
      if (error != DS4_JSON_OK) goto done;
      if (is_name) top->name = (uint32_t)n;
      words[n++] = ds4_tape_word(p - body, s.quote + 1 - p, s.flags);
      if (s.flags != 0) words[n++] = (uint64_t)s.chars | (uint64_t)s.width << 32;
      p = s.quote + 1;
      if (is_name) goto colon;
      break;
    case '{':
    case '[':
      if (depth == DS4_JSON_MAX_DEPTH) {
        fault = p;
        error = DS4_JSON_DEPTH;
        goto done;
      }
      top = &t->frames[depth++];
      top->word = (uint32_t)n;
      top->count = 0;
      top->name = 0;
      top->is_object = *p == '{';
      words[n] = (uint64_t)(p - body);
      n += 2;
      p = DS4_FN(skip_space)(p + 1);
      if (top->is_object) {
        if (*p == '}') goto close;
        goto name;
      }
      if (*p == ']') goto close;
      goto value;
    case 't':
      if (limit - p < 4 || memcmp(p, "true", 4) != 0) goto bad_literal;
      words[n++] = ds4_tape_word(p - body, 4, 0);
      p += 4;
      break;
    case 'f':
      if (limit - p < 5 || memcmp(p, "false", 5) != 0) goto bad_literal;
      words[n++] = ds4_tape_word(p - body, 5, 0);
      p += 5;
      break;
    case 'n':
      if (limit - p < 4 || memcmp(p, "null", 4) != 0) goto bad_literal;
      words[n++] = ds4_tape_word(p - body, 4, 0);
      p += 4;
      break;
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9': {
      unsigned flags;
      const uint8_t* end = DS4_FN(scan_number)(p, &flags);
      if (end == NULL) {
        fault = p;
        error = DS4_JSON_NUMBER;
        goto done;
      }
      words[n++] = ds4_tape_word(p - body, end - p, flags);
      if (ds4_json_may_be_infinite(flags, end - p)) t->large_numbers = 1;
      p = end;
      break;
    }
    default:
      fault = p;
      error = p == limit ? DS4_JSON_TRUNCATED : DS4_JSON_VALUE;
      goto done;
  }

after:
  p = DS4_FN(skip_space)(p);
  if (depth == 0) {
    if (p != limit) {
      fault = p;
      error = DS4_JSON_TRAILING;
    }
    goto done;
  }
  ++top->count;
  if (top->is_object) {
    if (*p == ',') {
      p = DS4_FN(skip_space)(p + 1);
      goto name;
    }
    if (*p == '}') goto close;
  } else {
    if (*p == ',') {
      p = DS4_FN(skip_space)(p + 1);
      goto value;
    }
    if (*p == ']') goto close;
  }
  fault = p;
  error = p == limit ? DS4_JSON_TRUNCATED : top->is_object ? DS4_JSON_MEMBER_END : DS4_JSON_ELEMENT_END;
  goto done;

name:
  top->name = 0;
  if (*p != '"') {
    fault = p;
    error = p == limit ? DS4_JSON_TRUNCATED : DS4_JSON_NAME;
    goto done;
  }
  // Every value leaves room for one more; if that is used up, `value` makes more and comes here again by itself.
  is_name = 1;
  if (capacity - n < 4) goto value;
  ++steps;
  goto string;

colon:
  is_name = 0;
  p = DS4_FN(skip_space)(p);
  if (*p != ':') {
    fault = p;
    error = p == limit ? DS4_JSON_TRUNCATED : DS4_JSON_COLON;
    goto done;
  }
  p = DS4_FN(skip_space)(p + 1);
  goto value;

close:
  words[top->word] = ds4_tape_word((int64_t)(words[top->word] & DS4_FIELD_MASK), n, 0);
  words[top->word + 1] = ds4_tape_word(p + 1 - body, top->count, 0);
  ++p;
  if (--depth > 0) --top;
  goto after;

bad_literal:
  fault = p;
  error = DS4_JSON_LITERAL;

done:
  t->words = words;
  t->n = n;
  t->capacity = capacity;
  t->steps = steps;
  t->depth = depth;
  t->error = error;
  t->error_at = fault == NULL ? 0 : fault - body;
  return error;
}

// One character of a scanned string at p.
static inline uint32_t DS4_FN(character)(const uint8_t* p, const uint8_t* limit, int escapes, int* length) {
  const uint8_t c = p[0];
  *length = 1;
  if (c < 0x80) return c == '\\' && escapes ? ds4_json_unescape(p, limit, length) : c;
  *length = 2;
  if (c < 0xE0) return (uint32_t)(c & 0x1F) << 6 | (p[1] & 0x3F);
  *length = 3;
  if (c < 0xF0) return (uint32_t)(c & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
  *length = 4;
  return (uint32_t)(c & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 | (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
}

#if defined(DS4_ISA_AVX512)

// Whole blocks with AVX-512: every byte position makes a character of itself and the bytes behind it, then those
// positions that begin no character are squeezed out. No branch depends on where characters begin. Stops before the
// last block (positions look three bytes ahead) and at the \u escapes of a block, which the caller takes.

typedef struct {
  __m512i v;      // the block, escaped characters replaced by what they mean
  uint64_t keep;  // positions that begin a character
  uint64_t high;
} DS4_FN(squeezed);

// 0 if the block has a \u escape.
static inline int DS4_FN(squeeze)(const uint8_t* p, int escapes, uint64_t* escaped_first, DS4_FN(squeezed) * s) {
  __m512i v = _mm512_loadu_si512(p);
  const uint64_t high = DS4_FN(ge)(v, 0x80);
  uint64_t starts = 0;
  if (escapes) {
    starts = DS4_FN(escape_starts)(DS4_FN(eq)(v, '\\') & ~*escaped_first);
    const uint64_t escaped = starts << 1 | *escaped_first;
    if ((DS4_FN(eq)(v, 'u') & escaped) != 0) return 0;
    *escaped_first = starts >> 63;
    v = _mm512_mask_mov_epi8(v, escaped, DS4_FN(lookup)(DS4_FN(meaning), v));
  }
  s->v = v;
  s->high = high;
  s->keep = ~(high & ~DS4_FN(ge)(v, 0xC0)) & ~starts;
  return 1;
}

static inline uint8_t* DS4_FN(emit1)(const uint8_t* p, const DS4_FN(squeezed) * s, uint8_t* out) {
  // U+0080..U+00FF: C2 and the character itself, or C3 and the character less 0x40.
  const __m512i next = _mm512_loadu_si512(p + 1);
  const __m512i moved = _mm512_mask_add_epi8(next, DS4_FN(eq)(s->v, 0xC3), next, _mm512_set1_epi8(0x40));
  const __m512i all = _mm512_mask_mov_epi8(s->v, s->high & s->keep, moved);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(s->keep, all));
  return out + __builtin_popcountll(s->keep);
}

static inline uint16_t* DS4_FN(emit2)(const uint8_t* p, const DS4_FN(squeezed) * s, uint16_t* out) {
  const __m512i six = _mm512_set1_epi16(0x3F);
  for (int half = 0; half < 2; ++half) {
    const uint32_t keep = (uint32_t)(s->keep >> (32 * half));
    const __m512i a =
        _mm512_cvtepu8_epi16(half == 0 ? _mm512_castsi512_si256(s->v) : _mm512_extracti64x4_epi64(s->v, 1));
    __m512i code = a;
    if (s->high != 0) {
      const uint8_t* q = p + 32 * half;
      const __m512i b = _mm512_and_si512(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(q + 1))), six);
      const __m512i c = _mm512_and_si512(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(q + 2))), six);
      const __mmask32 two = _mm512_cmpge_epu16_mask(a, _mm512_set1_epi16(0xC0));
      const __mmask32 three = _mm512_cmpge_epu16_mask(a, _mm512_set1_epi16(0xE0));
      // Sixteen bits drop what is left of the lead byte's mark, except for the top of a two-byte one.
      const __m512i wide = _mm512_or_si512(_mm512_slli_epi16(a, 6), b);
      code = _mm512_mask_mov_epi16(code, two, _mm512_and_si512(wide, _mm512_set1_epi16(0x7FF)));
      code = _mm512_mask_mov_epi16(code, three, _mm512_or_si512(_mm512_slli_epi16(wide, 6), c));
    }
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(keep, code));
    out += __builtin_popcount(keep);
  }
  return out;
}

static inline uint32_t* DS4_FN(emit4)(const uint8_t* p, const DS4_FN(squeezed) * s, uint32_t* out) {
  const __m512i six = _mm512_set1_epi32(0x3F);
  __m128i part[4];
  _mm512_storeu_si512(part, s->v);
  for (int i = 0; i < 4; ++i) {
    const __mmask16 keep = (__mmask16)(s->keep >> (16 * i));
    const __m512i a = _mm512_cvtepu8_epi32(part[i]);
    __m512i code = a;
    if (s->high != 0) {
      const uint8_t* q = p + 16 * i;
      const __m512i b = _mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(q + 1))), six);
      const __m512i c = _mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(q + 2))), six);
      const __m512i d = _mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(q + 3))), six);
      const __mmask16 two = _mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(0xC0));
      const __mmask16 three = _mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(0xE0));
      const __mmask16 four = _mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(0xF0));
      const __m512i wide2 = _mm512_or_si512(_mm512_slli_epi32(a, 6), b);
      const __m512i wide3 = _mm512_or_si512(_mm512_slli_epi32(wide2, 6), c);
      const __m512i wide4 = _mm512_or_si512(_mm512_slli_epi32(wide3, 6), d);
      code = _mm512_mask_and_epi32(code, two, wide2, _mm512_set1_epi32(0x7FF));
      code = _mm512_mask_and_epi32(code, three, wide3, _mm512_set1_epi32(0xFFFF));
      code = _mm512_mask_and_epi32(code, four, wide4, _mm512_set1_epi32(0x1FFFFF));
    }
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(keep, code));
    out += __builtin_popcount(keep);
  }
  return out;
}

#define DS4_WHOLE_BLOCKS(EMIT)                                          \
  uint64_t escaped_first = 0;                                           \
  while (limit - p >= 68 && out_end - out >= 64) {                      \
    DS4_FN(squeezed) s;                                                 \
    if (!DS4_FN(squeeze)(p, escapes, &escaped_first, &s)) break;        \
    out = EMIT(p, &s, out);                                             \
    p += 64;                                                            \
  }                                                                     \
  /* Back to where a character begins, or on to it if it is written. */ \
  p -= escaped_first;                                                   \
  while (p < limit && (*p & 0xC0) == 0x80) ++p;                         \
  const uint8_t* const stop = limit - p > 64 ? p + 64 : limit;

#else
#define DS4_WHOLE_BLOCKS(EMIT) const uint8_t* const stop = limit;
#endif

// Decodes valid UTF-8, the inside [p, limit) of a scanned string (`escapes`) or any other, into `chars` characters of
// one width. Between two escapes or non-ASCII characters, text is widened in bulk where a whole block fits.
#define DS4_DECODE(NAME, UNIT, EMIT)                                                                         \
  static void DS4_FN(NAME)(const uint8_t* restrict p, const uint8_t* limit, int escapes, UNIT* restrict out, \
                           int64_t chars) {                                                                  \
    UNIT* const out_end = out + chars;                                                                       \
    while (p < limit) {                                                                                      \
      DS4_WHOLE_BLOCKS(EMIT)                                                                                 \
      while (p < stop) {                                                                                     \
        const int64_t left = limit - p;                                                                      \
        const DS4_FN(block) v = left >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, left);                   \
        const uint64_t odd = DS4_FN(ge)(v, 0x80) | (escapes ? DS4_FN(eq)(v, '\\') : 0);                      \
        const int64_t run = odd != 0 ? __builtin_ctzll(odd) : left < 64 ? left : 64;                         \
        if (left >= 64 && out_end - out >= 64) {                                                             \
          for (int i = 0; i < 64; ++i) out[i] = p[i];                                                        \
        } else {                                                                                             \
          for (int64_t i = 0; i < run; ++i) out[i] = p[i];                                                   \
        }                                                                                                    \
        out += run;                                                                                          \
        p += run;                                                                                            \
        while (p < limit && (*p >= 0x80 || (*p == '\\' && escapes))) {                                       \
          int length;                                                                                        \
          *out++ = (UNIT)DS4_FN(character)(p, limit, escapes, &length);                                      \
          p += length;                                                                                       \
        }                                                                                                    \
      }                                                                                                      \
    }                                                                                                        \
  }

DS4_DECODE(decode1, uint8_t, DS4_FN(emit1))
DS4_DECODE(decode2, uint16_t, DS4_FN(emit2))
DS4_DECODE(decode4, uint32_t, DS4_FN(emit4))
#undef DS4_DECODE
#undef DS4_WHOLE_BLOCKS

// Characters of valid UTF-8 [p, limit), and the width class of the widest.
static int64_t DS4_FN(extent)(const uint8_t* p, const uint8_t* limit, unsigned* width) {
  int64_t chars = limit - p;
  uint64_t any = 0, any_c4 = 0, any_f0 = 0;
  for (; p < limit; p += 64) {
    const int64_t left = limit - p;
    const DS4_FN(block) v = left >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, left);
    const uint64_t high = DS4_FN(ge)(v, 0x80);
    any |= high;
    any_c4 |= DS4_FN(ge)(v, 0xC4);
    any_f0 |= DS4_FN(ge)(v, 0xF0);
    chars -= __builtin_popcountll(high & ~DS4_FN(ge)(v, 0xC0));
  }
  *width = any_f0 != 0 ? DS4_UCS4 : any_c4 != 0 ? DS4_UCS2 : any != 0 ? DS4_LATIN1 : DS4_ASCII;
  return chars;
}

// Bytes that `n` one-byte characters below 0x80 take when escaped, quotes around them not counted.
static int64_t DS4_FN(escaped_size)(const uint8_t* p, int64_t n) {
  int64_t size = n;
  while (n > 0) {
    const DS4_FN(block) v = n >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, n);
    const uint64_t valid = n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1;
    const uint64_t marks = DS4_FN(eq)(v, '"') | DS4_FN(eq)(v, '\\');
    const uint64_t control = ~DS4_FN(ge)(v, 0x20) & valid;
    size += __builtin_popcountll(marks);
    if (control != 0) {
      const uint64_t brief = DS4_FN(eq)(v, '\n') | DS4_FN(eq)(v, '\r') | DS4_FN(eq)(v, '\t');
      size += __builtin_popcountll(brief) + 5 * __builtin_popcountll(control & ~brief);
    }
    p += 64;
    n -= 64;
  }
  return size;
}

#undef DS4_EVEN
#undef DS4_FN
#undef DS4_JOIN
#undef DS4_JOIN2

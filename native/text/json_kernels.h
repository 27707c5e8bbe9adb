// The JSON scanner and the string decoder, written over the masks of block.h: one source for all instruction sets.
//
// A string is scanned in blocks of 64 bytes. Each block yields masks of quotes, backslashes, control characters and
// bytes >= 0x80; the work per block is the same whatever the text, plus a few nanoseconds for each escape. UTF-8 is
// checked by arithmetic on the masks: the set of continuation bytes must equal the set of bytes that the lead bytes
// call for, and the bytes after E0, ED, F0, F4 must lie in their narrower ranges (Unicode 15, table 3-7).

typedef struct {
  const uint8_t* quote;  // the closing one
  int64_t chars;
  unsigned width;
  unsigned flags;
} DS4_FN(string);

// Scans the string whose first byte after the opening quote is `begin`.
static ds4_json_error DS4_FN(scan_string)(const uint8_t* begin, const uint8_t* limit, DS4_FN(string) * out,
                                          int64_t* steps, const uint8_t** fault) {
  const uint8_t* p = begin;
  const uint8_t* low_half = NULL;  // backslash of the low surrogate that completes a pair
  int64_t saved = 0;               // bytes that are no characters of their own
  unsigned width = DS4_ASCII, flags = 0;
  uint64_t skip = 0;  // 1 if this block's first byte is the escaped one of an escape begun in the last block
  uint64_t due = 0, due_e0 = 0, due_ed = 0, due_f0 = 0, due_f4 = 0;  // what the last block's lead bytes call for
  for (;;) {
    const int64_t left = limit - p;
    ++*steps;
    if (left <= 0) {
      *fault = begin - 1;
      return DS4_JSON_UNTERMINATED;
    }
    const uint64_t valid = left >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << left) - 1;
    const DS4_FN(block) v = left >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, left);
    uint64_t quotes = DS4_FN(eq)(v, '"') & ~skip;
    uint64_t slashes = DS4_FN(eq)(v, '\\') & ~skip;
    const uint64_t control = ~DS4_FN(ge)(v, 0x20) & valid;
    const uint64_t high = DS4_FN(ge)(v, 0x80);
    skip = 0;
    while (slashes != 0) {
      const int i = __builtin_ctzll(slashes);
      if ((quotes & ((UINT64_C(1) << i) - 1)) != 0) break;
      const uint8_t* at = p + i;
      const int64_t room = limit - at;
      if (room < 2) {
        *fault = begin - 1;
        return DS4_JSON_UNTERMINATED;
      }
      flags |= DS4_ESCAPED;
      if (at[1] == 'u') {
        const int32_t unit = room >= 6 ? ds4_hex4(at + 2) : -1;
        if (unit < 0) {
          *fault = at;
          return DS4_JSON_HEX;
        }
        saved += 5;
        if (at == low_half) {
          saved += 1;
        } else if (unit >= 0xD800 && unit <= 0xDFFF) {
          int length;
          const uint32_t code = ds4_json_unescape(at, limit, &length);
          if (length == 12) low_half = at + 6;
          width = code > 0xFFFF ? DS4_UCS4 : width > DS4_UCS2 ? width : DS4_UCS2;
        } else {
          const unsigned w = unit < 0x80 ? DS4_ASCII : unit < 0x100 ? DS4_LATIN1 : DS4_UCS2;
          if (w > width) width = w;
        }
      } else {
        switch (at[1]) {
          case '"':
          case '\\':
          case '/':
          case 'b':
          case 'f':
          case 'n':
          case 'r':
          case 't':
            break;
          default:
            *fault = at;
            return DS4_JSON_ESCAPE;
        }
        saved += 1;
      }
      if (i == 63) {
        slashes = 0;
        skip = 1;
      } else {
        slashes &= ~(UINT64_C(3) << i);
        quotes &= ~(UINT64_C(2) << i);
      }
    }
    const uint64_t until = quotes != 0 ? quotes ^ (quotes - 1) : valid;  // through the closing quote
    if ((control & until) != 0) {
      *fault = p + __builtin_ctzll(control & until);
      return DS4_JSON_CONTROL;
    }
    if (((high & until) | due) != 0) {
      const uint64_t c0 = DS4_FN(ge)(v, 0xC0), c2 = DS4_FN(ge)(v, 0xC2), c4 = DS4_FN(ge)(v, 0xC4);
      const uint64_t e0 = DS4_FN(ge)(v, 0xE0), f0 = DS4_FN(ge)(v, 0xF0), f5 = DS4_FN(ge)(v, 0xF5);
      const uint64_t a0 = DS4_FN(ge)(v, 0xA0), b90 = DS4_FN(ge)(v, 0x90);
      const uint64_t continuation = high & ~c0;
      // Leads of two bytes or more, three or more, four.
      const uint64_t lead2 = c2 & ~f5 & until, lead3 = e0 & ~f5 & until, lead4 = f0 & ~f5 & until;
      const uint64_t is_e0 = DS4_FN(eq)(v, 0xE0) & until, is_ed = DS4_FN(eq)(v, 0xED) & until;
      const uint64_t is_f0 = DS4_FN(eq)(v, 0xF0) & until, is_f4 = DS4_FN(eq)(v, 0xF4) & until;
      const uint64_t called = lead2 << 1 | lead3 << 2 | lead4 << 3 | due;
      uint64_t bad = (called ^ continuation) | (c0 & ~c2) | f5;
      bad |= (is_e0 << 1 | due_e0) & ~a0;
      bad |= (is_ed << 1 | due_ed) & a0;
      bad |= (is_f0 << 1 | due_f0) & ~b90;
      bad |= (is_f4 << 1 | due_f4) & b90;
      if ((bad & until) != 0) {
        *fault = p + __builtin_ctzll(bad & until);
        return DS4_JSON_UTF8;
      }
      due = lead2 >> 63 | lead3 >> 62 | lead4 >> 61;
      due_e0 = is_e0 >> 63;
      due_ed = is_ed >> 63;
      due_f0 = is_f0 >> 63;
      due_f4 = is_f4 >> 63;
      saved += __builtin_popcountll(continuation & until);
      flags |= DS4_WIDE;
      const unsigned w = lead4 != 0 ? DS4_UCS4 : (c4 & until) != 0 ? DS4_UCS2 : DS4_LATIN1;
      if (w > width) width = w;
    }
    if (quotes != 0) {
      out->quote = p + __builtin_ctzll(quotes);
      out->chars = out->quote - begin - saved;
      out->width = width;
      out->flags = flags;
      return DS4_JSON_OK;
    }
    p += 64;
  }
}

static inline const uint8_t* DS4_FN(skip_space)(const uint8_t* p) {
  while (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t') ++p;
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
    *flags = DS4_FLOAT;
    ++p;
    if (*p == '+' || *p == '-') ++p;
    if (*p < '0' || *p > '9') return NULL;
    do ++p;
    while (*p >= '0' && *p <= '9');
  }
  return p;
}

// Fills the tape from the body. On an error sets error and error_at and leaves the frames of the open containers.
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
    const int64_t more = capacity + capacity / 2 + 64;
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
  if (*p != '"') {
    fault = p;
    error = p == limit ? DS4_JSON_TRUNCATED : DS4_JSON_NAME;
    goto done;
  }
  // The container's words are never the first ones of a name, so 0 can mean none. Room for a name and the next value
  // is there: every value leaves at least two words.
  top->name = (uint32_t)n;
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

// Decodes the inside [p, limit) of a scanned string into `chars` characters of one width. Between two escapes or
// non-ASCII characters, plain text is widened in bulk wherever a whole block fits the destination.
#define DS4_DECODE(NAME, UNIT)                                                                                   \
  static void DS4_FN(NAME)(const uint8_t* restrict p, const uint8_t* limit, UNIT* restrict out, int64_t chars) { \
    UNIT* const out_end = out + chars;                                                                           \
    while (p < limit) {                                                                                          \
      const int64_t left = limit - p;                                                                            \
      const DS4_FN(block) v = left >= 64 ? DS4_FN(load)(p) : DS4_FN(load_part)(p, left);                         \
      const uint64_t odd = DS4_FN(ge)(v, 0x80) | DS4_FN(eq)(v, '\\');                                            \
      const int64_t some = left < 64 ? left : 64;                                                                \
      const int64_t run = odd != 0 ? __builtin_ctzll(odd) : some;                                                \
      if (left >= 64 && out_end - out >= 64) {                                                                   \
        for (int i = 0; i < 64; ++i) out[i] = p[i];                                                              \
      } else {                                                                                                   \
        for (int64_t i = 0; i < run; ++i) out[i] = p[i];                                                         \
      }                                                                                                          \
      out += run;                                                                                                \
      p += run;                                                                                                  \
      if (odd == 0) continue;                                                                                    \
      do {                                                                                                       \
        int length;                                                                                              \
        uint32_t code;                                                                                           \
        const uint8_t c = *p;                                                                                    \
        if (c == '\\') {                                                                                         \
          code = ds4_json_unescape(p, limit, &length);                                                           \
        } else if (c < 0xE0) {                                                                                   \
          code = (uint32_t)(c & 0x1F) << 6 | (p[1] & 0x3F);                                                      \
          length = 2;                                                                                            \
        } else if (c < 0xF0) {                                                                                   \
          code = (uint32_t)(c & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);                      \
          length = 3;                                                                                            \
        } else {                                                                                                 \
          code = (uint32_t)(c & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12;                                     \
          code |= (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);                                                  \
          length = 4;                                                                                            \
        }                                                                                                        \
        *out++ = (UNIT)code;                                                                                     \
        p += length;                                                                                             \
      } while (p < limit && (*p >= 0x80 || *p == '\\'));                                                         \
    }                                                                                                            \
  }

DS4_DECODE(decode1, uint8_t)
DS4_DECODE(decode2, uint16_t)
DS4_DECODE(decode4, uint32_t)
#undef DS4_DECODE

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

#undef DS4_FN
#undef DS4_JOIN
#undef DS4_JOIN2

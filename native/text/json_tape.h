// What the JSON scanner leaves behind: a tape, one or two 64-bit words per value, in document order. C, not C++.
//
//   {"a": [1, "x\n"], "b": 2.5}
//
//   word  entry                        low 30 bits   next 30 bits     top 4 bits
//   0     {                            start         word after it    -
//   1       (second word of {)         end           members          -
//   2     "a"                          start         length           0
//   3     [                            start         word after it    -
//   4       (second word of [)         end           elements         -
//   5     1                            start         length           0
//   6     "x\n"                        start         length           DS4_ESCAPED
//   7       (second word of a string   characters (low 32 bits), width class (high 32 bits)
//            with any flag)
//   8     "b" ...
//
// Invariants. A string's span includes its quotes. Its kind is told by the first byte. A string without flags is ASCII
// without escapes, so its text is its bytes. Words: at most two per value, and a value with two words has at least two
// bytes plus a separator, so a tape is never longer than 2/3 of the body (in words per byte).
#ifndef DS4_TEXT_JSON_TAPE_H_
#define DS4_TEXT_JSON_TAPE_H_

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DS4_JSON_MAX_DEPTH = 256 };
enum { DS4_ESCAPED = 1, DS4_WIDE = 2 };                              // of strings; DS4_WIDE: bytes >= 0x80
enum { DS4_FLOAT = 1, DS4_EXPONENT = 2 };                            // of numbers; DS4_FLOAT: fraction or exponent
enum { DS4_ASCII = 0, DS4_LATIN1 = 1, DS4_UCS2 = 2, DS4_UCS4 = 3 };  // width class of the widest character

#define DS4_JSON_MAX_BYTES ((INT64_C(1) << 30) - 1)
#define DS4_FIELD_MASK ((UINT64_C(1) << 30) - 1)

typedef enum {
  DS4_JSON_OK = 0,
  DS4_JSON_EMPTY,
  DS4_JSON_BOM,
  DS4_JSON_TRUNCATED,
  DS4_JSON_VALUE,
  DS4_JSON_NAME,
  DS4_JSON_COLON,
  DS4_JSON_MEMBER_END,
  DS4_JSON_ELEMENT_END,
  DS4_JSON_TRAILING,
  DS4_JSON_NUMBER,
  DS4_JSON_LITERAL,
  DS4_JSON_ESCAPE,
  DS4_JSON_HEX,
  DS4_JSON_CONTROL,
  DS4_JSON_UTF8,
  DS4_JSON_UNTERMINATED,
  DS4_JSON_DEPTH,
  DS4_JSON_SIZE,
  DS4_JSON_MEMORY
} ds4_json_error;

static inline const char* ds4_json_message(int error) {
  switch (error) {
    case DS4_JSON_EMPTY:
      return "the text is empty";
    case DS4_JSON_BOM:
      return "byte order mark before the value";
    case DS4_JSON_TRUNCATED:
      return "the text ends inside a value";
    case DS4_JSON_VALUE:
      return "expected a value";
    case DS4_JSON_NAME:
      return "expected a member name in double quotes";
    case DS4_JSON_COLON:
      return "expected `:` after a member name";
    case DS4_JSON_MEMBER_END:
      return "expected `,` or `}` after a member";
    case DS4_JSON_ELEMENT_END:
      return "expected `,` or `]` after an element";
    case DS4_JSON_TRAILING:
      return "unexpected text after the value";
    case DS4_JSON_NUMBER:
      return "invalid number";
    case DS4_JSON_LITERAL:
      return "invalid literal (only true, false and null exist)";
    case DS4_JSON_ESCAPE:
      return "invalid escape in a string";
    case DS4_JSON_HEX:
      return "invalid \\u escape in a string";
    case DS4_JSON_CONTROL:
      return "raw control character in a string";
    case DS4_JSON_UTF8:
      return "invalid UTF-8 in a string";
    case DS4_JSON_UNTERMINATED:
      return "string without closing quote";
    case DS4_JSON_DEPTH:
      return "more than 256 nested containers";
    case DS4_JSON_SIZE:
      return "text of 2**30 bytes or more";
    default:
      return "out of memory";
  }
}

// An open container while scanning; after an error, the path to it.
typedef struct {
  uint32_t word;   // its first word on the tape
  uint32_t count;  // finished members or elements
  uint32_t name;   // word of the current member's name, 0 until that is read
  int is_object;
} ds4_json_frame;

typedef struct {
  const uint8_t* body;  // body[size] must be readable and 0
  int64_t size;
  uint64_t* words;
  int64_t n;
  int64_t capacity;
  int large_numbers;  // is there a number that may be infinite as a double?
  int64_t steps;      // tokens and string blocks, for tests of linearity
  ds4_json_error error;
  int64_t error_at;  // offset of the byte at fault
  int64_t at;        // where scanning goes on, if `depth` containers are open (ds4_json_resume)
  int depth;
  ds4_json_frame* frames;  // DS4_JSON_MAX_DEPTH of them, the caller's: needed as long as a scan and its error report
} ds4_json_tape;

static inline int64_t ds4_tape_start(const uint64_t* w) {
  return (int64_t)(w[0] & DS4_FIELD_MASK);
}
static inline int64_t ds4_tape_second(const uint64_t* w) {
  return (int64_t)((w[0] >> 30) & DS4_FIELD_MASK);
}
static inline unsigned ds4_tape_flags(const uint64_t* w) {
  return (unsigned)(w[0] >> 60);
}
static inline uint64_t ds4_tape_word(int64_t first, int64_t second, unsigned flags) {
  return (uint64_t)first | (uint64_t)second << 30 | (uint64_t)flags << 60;
}

// Without exponent, 308 digits are always finite.
static inline int ds4_json_may_be_infinite(unsigned flags, int64_t length) {
  return (flags & DS4_EXPONENT) != 0 || length > 300;
}

static inline int ds4_json_is_container(uint8_t first) {
  return (first & 0xDF) == 0x5B;
}  // '{' or '['

// The word after a whole value.
static inline int64_t ds4_tape_next(const uint8_t* body, const uint64_t* words, int64_t at) {
  const uint8_t first = body[ds4_tape_start(words + at)];
  if (ds4_json_is_container(first)) return ds4_tape_second(words + at);
  return at + 1 + (first == '"' && ds4_tape_flags(words + at) != 0);
}

// The offset after a value's last byte.
static inline int64_t ds4_tape_end(const uint8_t* body, const uint64_t* words, int64_t at) {
  const int64_t start = ds4_tape_start(words + at);
  if (ds4_json_is_container(body[start])) return ds4_tape_start(words + at + 1);
  return start + ds4_tape_second(words + at);
}

// Makes `t`, which has frames and is zero otherwise, begin like `old`, a whole tape whose body has the same first
// `same` bytes: with the words of every value that ended in them, and the containers that were open then. Scanning
// goes on behind the last of these values. Returns 0 and changes no words when there is none.
static inline int ds4_json_resume(const ds4_json_tape* old, int64_t same, ds4_json_tape* t) {
  const uint8_t* const body = old->body;
  const uint64_t* const words = old->words;
  ds4_json_frame last_frame = {0, 0, 0, 0};  // of the container behind whose finished value scanning goes on
  int64_t at = 0, n = 0, resume_at = 0;
  int depth = 0, open = 0;
  while (depth < DS4_JSON_MAX_DEPTH) {
    const int64_t start = ds4_tape_start(words + at);
    if (start >= same || !ds4_json_is_container(body[start])) break;
    ds4_json_frame* const frame = &t->frames[depth++];
    frame->word = (uint32_t)at;
    frame->count = 0;
    frame->name = 0;
    frame->is_object = body[start] == '{';
    const int64_t end = ds4_tape_second(words + at);
    int64_t child = at + 2, value = child;
    while (child < end) {
      value = frame->is_object ? ds4_tape_next(body, words, child) : child;
      // A number ends with the byte behind it: that one must be the same too.
      if (ds4_tape_end(body, words, value) >= same) break;
      if (frame->is_object) frame->name = (uint32_t)child;
      last_frame = *frame;
      ++frame->count;
      open = depth;
      n = child = ds4_tape_next(body, words, value);
      resume_at = ds4_tape_end(body, words, value);
    }
    if (child >= end) break;
    if (frame->is_object) frame->name = (uint32_t)child;
    at = value;
  }
  if (open == 0) return 0;
  const int64_t capacity = n + n / 8 + 64;
  uint64_t* copy = (uint64_t*)malloc((size_t)capacity * sizeof *copy);
  if (copy == NULL) return 0;
  memcpy(copy, words, (size_t)n * sizeof *copy);
  t->frames[open - 1] = last_frame;  // its count is raised when scanning goes on
  t->words = copy;
  t->capacity = capacity;
  t->n = n;
  t->at = resume_at;
  t->depth = open;
  t->large_numbers = old->large_numbers;
  return 1;
}

// What a byte is worth as a hexadecimal digit, -1 if it is none. A table, as digits and letters alternate at random.
#define DS4_NONE4 -1, -1, -1, -1
#define DS4_NONE16 DS4_NONE4, DS4_NONE4, DS4_NONE4, DS4_NONE4
#define DS4_LETTERS16 -1, 10, 11, 12, 13, 14, 15, -1, DS4_NONE4, DS4_NONE4
static const int8_t ds4_hex_digit[256] = {DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          0,
                                          1,
                                          2,
                                          3,
                                          4,
                                          5,
                                          6,
                                          7,
                                          8,
                                          9,
                                          -1,
                                          -1,
                                          DS4_NONE4,
                                          DS4_LETTERS16,
                                          DS4_NONE16,
                                          DS4_LETTERS16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16,
                                          DS4_NONE16};
#undef DS4_NONE4
#undef DS4_NONE16
#undef DS4_LETTERS16

// The value of four hexadecimal digits, negative if they are not.
static inline int32_t ds4_hex4(const uint8_t* p) {
  return ds4_hex_digit[p[0]] * 4096 | ds4_hex_digit[p[1]] * 256 | ds4_hex_digit[p[2]] * 16 | ds4_hex_digit[p[3]];
}

// The code point of the valid escape whose backslash is at p, and its length in bytes. A high surrogate takes the low
// one after it along; any other surrogate is U+FFFD and leaves what follows alone.
static inline uint32_t ds4_json_unescape(const uint8_t* p, const uint8_t* limit, int* length) {
  *length = 2;
  switch (p[1]) {
    case 'b':
      return 8;
    case 'f':
      return 12;
    case 'n':
      return 10;
    case 'r':
      return 13;
    case 't':
      return 9;
    case 'u':
      break;
    default:
      return p[1];
  }
  *length = 6;
  const uint32_t high = (uint32_t)ds4_hex4(p + 2);
  if (high < 0xD800 || high > 0xDFFF) return high;
  if (high < 0xDC00 && limit - p >= 12 && p[6] == '\\' && p[7] == 'u') {
    const int32_t low = ds4_hex4(p + 8);
    if (low >= 0xDC00 && low <= 0xDFFF) {
      *length = 12;
      return 0x10000 + ((high - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
    }
  }
  return 0xFFFD;
}

#endif  // DS4_TEXT_JSON_TAPE_H_

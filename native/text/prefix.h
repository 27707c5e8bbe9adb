// Length of the equal prefix of two byte strings. C, not C++.
#ifndef DS4_TEXT_PREFIX_H_
#define DS4_TEXT_PREFIX_H_

#include <stdint.h>
#include <string.h>

static inline int64_t ds4_common_prefix(const uint8_t* a, const uint8_t* b, int64_t n) {
  int64_t i = 0;
  // 32 bytes are compared as four words that are or-ed: compilers turn it into vectors.
  for (; n - i >= 32; i += 32) {
    uint64_t x[4], y[4];
    memcpy(x, a + i, 32);
    memcpy(y, b + i, 32);
    if (((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) != 0) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

#endif  // DS4_TEXT_PREFIX_H_

// Length of the equal prefix of two byte strings. C, not C++.
#ifndef DS4_TEXT_PREFIX_H_
#define DS4_TEXT_PREFIX_H_

#include <stdint.h>
#include <string.h>

static inline int64_t ds4_common_prefix(const uint8_t* a, const uint8_t* b, int64_t n) {
  int64_t i = 0;
  // The C library's comparison uses the best vectors there are but does not say where the difference is.
  while (n - i >= 4096 && memcmp(a + i, b + i, 4096) == 0) i += 4096;
  while (n - i >= 64 && memcmp(a + i, b + i, 64) == 0) i += 64;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

#endif  // DS4_TEXT_PREFIX_H_

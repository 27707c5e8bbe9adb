/* Coverage of the native code for libFuzzer, which GCC's instrumentation does not speak to by itself.
 *
 *     -fsanitize-coverage=trace-pc    every basic block calls __sanitizer_cov_trace_pc: counted here by place
 *     -fsanitize-coverage=trace-cmp   every comparison calls __sanitizer_cov_trace_cmp*: passed on
 *
 * Linked into each extension module of a build for fuzzing (DS4_COVERAGE in setup.py). The counters of a module are a
 * table of its own, handed to the fuzzer by `ds4_coverage`; until then comparisons go nowhere. All but that function is
 * hidden, so that a module calls its own copy whatever else the process has loaded.
 */
#include <stddef.h>
#include <stdint.h>

#define PLAIN __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined")))
#define HIDDEN PLAIN __attribute__((visibility("hidden")))

enum { BITS = 16, PLACES = 1 << BITS };

static uint8_t counters[PLACES];
/* libFuzzer wants an address and flags for each counter. */
static uintptr_t places[PLACES][2];

typedef void (*range_function)(void* start, void* stop);

static void (*compare1)(uint8_t, uint8_t);
static void (*compare2)(uint16_t, uint16_t);
static void (*compare4)(uint32_t, uint32_t);
static void (*compare8)(uint64_t, uint64_t);
static void (*choose)(uint64_t, void*);

/* Two blocks that meet in one counter are seen as one; the multiplier spreads them. */
HIDDEN void __sanitizer_cov_trace_pc(void) {
  uint32_t place = (uint32_t)((uintptr_t)__builtin_return_address(0) - (uintptr_t)counters) * 2654435761u;
  counters[place >> (32 - BITS)]++;
}

HIDDEN void __sanitizer_cov_trace_cmp1(uint8_t a, uint8_t b) {
  if (compare1) compare1(a, b);
}
HIDDEN void __sanitizer_cov_trace_cmp2(uint16_t a, uint16_t b) {
  if (compare2) compare2(a, b);
}
HIDDEN void __sanitizer_cov_trace_cmp4(uint32_t a, uint32_t b) {
  if (compare4) compare4(a, b);
}
HIDDEN void __sanitizer_cov_trace_cmp8(uint64_t a, uint64_t b) {
  if (compare8) compare8(a, b);
}
HIDDEN void __sanitizer_cov_trace_const_cmp1(uint8_t a, uint8_t b) {
  if (compare1) compare1(a, b);
}
HIDDEN void __sanitizer_cov_trace_const_cmp2(uint16_t a, uint16_t b) {
  if (compare2) compare2(a, b);
}
HIDDEN void __sanitizer_cov_trace_const_cmp4(uint32_t a, uint32_t b) {
  if (compare4) compare4(a, b);
}
HIDDEN void __sanitizer_cov_trace_const_cmp8(uint64_t a, uint64_t b) {
  if (compare8) compare8(a, b);
}
HIDDEN void __sanitizer_cov_trace_cmpf(float a, float b) {}
HIDDEN void __sanitizer_cov_trace_cmpd(double a, double b) {}
HIDDEN void __sanitizer_cov_trace_switch(uint64_t value, void* cases) {
  if (choose) choose(value, cases);
}

/* Called once by the runner with libFuzzer's functions: counters, places, comparisons of 1 to 8 bytes, switch. */
PLAIN __attribute__((visibility("default"))) void ds4_coverage(void* const functions[7]) {
  for (size_t i = 0; i < PLACES; i++) places[i][0] = (uintptr_t)&counters[i];
  ((range_function)functions[0])(counters, counters + PLACES);
  ((range_function)functions[1])(places, places + PLACES);
  compare1 = (void (*)(uint8_t, uint8_t))functions[2];
  compare2 = (void (*)(uint16_t, uint16_t))functions[3];
  compare4 = (void (*)(uint32_t, uint32_t))functions[4];
  compare8 = (void (*)(uint64_t, uint64_t))functions[5];
  choose = (void (*)(uint64_t, void*))functions[6];
}

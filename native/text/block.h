// 64 bytes at a time, seen through 64-bit masks. Included once per instruction set with DS4_ISA (the suffix) and one of
// DS4_ISA_SCALAR, DS4_ISA_SSE2, DS4_ISA_AVX2, DS4_ISA_AVX512 defined; bit i of a mask speaks of byte i.
//
//   load(p)          64 bytes from p
//   load_part(p, n)  n < 64 bytes, the others 0, nothing beyond them touched
//   eq(v, c)         byte == c
//   ge(v, c)         byte >= c, unsigned
#define DS4_JOIN2(a, b) a##_##b
#define DS4_JOIN(a, b) DS4_JOIN2(a, b)
#define DS4_FN(name) DS4_JOIN(ds4_##name, DS4_ISA)

#if defined(DS4_ISA_AVX512)

typedef __m512i DS4_FN(block);

static inline DS4_FN(block) DS4_FN(load)(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}
static inline DS4_FN(block) DS4_FN(load_part)(const uint8_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi8((UINT64_C(1) << n) - 1, p);
}
// Into a general register at once. Compilers would rather feed one compare with the mask of another, which puts mask
// registers, several cycles each way, into the chain from one block to the next.
static inline uint64_t DS4_FN(general)(__mmask64 k) {
  uint64_t mask = k;
  __asm__("" : "+r"(mask));
  return mask;
}
static inline uint64_t DS4_FN(eq)(DS4_FN(block) v, uint8_t c) {
  return DS4_FN(general)(_mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)c)));
}
static inline uint64_t DS4_FN(ge)(DS4_FN(block) v, uint8_t c) {
  return DS4_FN(general)(_mm512_cmpge_epu8_mask(v, _mm512_set1_epi8((char)c)));
}

#elif defined(DS4_ISA_AVX2)

typedef struct {
  __m256i part[2];
} DS4_FN(block);

static inline DS4_FN(block) DS4_FN(load)(const uint8_t* p) {
  const DS4_FN(block) v = {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}};
  return v;
}
static inline uint64_t DS4_FN(mask)(__m256i low, __m256i high) {
  return (uint64_t)(uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}
static inline uint64_t DS4_FN(eq)(DS4_FN(block) v, uint8_t c) {
  const __m256i k = _mm256_set1_epi8((char)c);
  return DS4_FN(mask)(_mm256_cmpeq_epi8(v.part[0], k), _mm256_cmpeq_epi8(v.part[1], k));
}
static inline uint64_t DS4_FN(ge)(DS4_FN(block) v, uint8_t c) {
  const __m256i k = _mm256_set1_epi8((char)c);
  return DS4_FN(mask)(_mm256_cmpeq_epi8(_mm256_max_epu8(v.part[0], k), v.part[0]),
                      _mm256_cmpeq_epi8(_mm256_max_epu8(v.part[1], k), v.part[1]));
}

#elif defined(DS4_ISA_SSE2)

typedef struct {
  __m128i part[4];
} DS4_FN(block);

static inline DS4_FN(block) DS4_FN(load)(const uint8_t* p) {
  DS4_FN(block) v;
  for (int i = 0; i < 4; ++i) v.part[i] = _mm_loadu_si128((const __m128i*)(p + 16 * i));
  return v;
}
static inline uint64_t DS4_FN(eq)(DS4_FN(block) v, uint8_t c) {
  const __m128i k = _mm_set1_epi8((char)c);
  uint64_t m = 0;
  for (int i = 0; i < 4; ++i) m |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v.part[i], k)) << (16 * i);
  return m;
}
static inline uint64_t DS4_FN(ge)(DS4_FN(block) v, uint8_t c) {
  const __m128i k = _mm_set1_epi8((char)c);
  uint64_t m = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128i hit = _mm_cmpeq_epi8(_mm_max_epu8(v.part[i], k), v.part[i]);
    m |= (uint64_t)(uint32_t)_mm_movemask_epi8(hit) << (16 * i);
  }
  return m;
}

#else

typedef struct {
  uint64_t part[8];
} DS4_FN(block);

static inline DS4_FN(block) DS4_FN(load)(const uint8_t* p) {
  DS4_FN(block) v;
  for (int i = 0; i < 8; ++i) {
    uint64_t word = 0;
    for (int k = 0; k < 8; ++k) word |= (uint64_t)p[8 * i + k] << (8 * k);
    v.part[i] = word;
  }
  return v;
}
// The top bits of eight bytes, as eight bits. The product puts bit 8k of its left side at bit 56 + k.
static inline uint64_t DS4_FN(tops)(uint64_t word) {
  return (((word >> 7) & UINT64_C(0x0101010101010101)) * UINT64_C(0x0102040810204080)) >> 56;
}
static inline uint64_t DS4_FN(eq)(DS4_FN(block) v, uint8_t c) {
  const uint64_t ones = UINT64_C(0x0101010101010101), sevens = ones * 0x7F;
  uint64_t m = 0;
  for (int i = 0; i < 8; ++i) {
    const uint64_t x = v.part[i] ^ (ones * c);
    m |= DS4_FN(tops)(~(((x & sevens) + sevens) | x)) << (8 * i);
  }
  return m;
}
static inline uint64_t DS4_FN(ge)(DS4_FN(block) v, uint8_t c) {
  const uint64_t ones = UINT64_C(0x0101010101010101), sevens = ones * 0x7F;
  uint64_t m = 0;
  for (int i = 0; i < 8; ++i) {
    const uint64_t x = v.part[i];
    const uint64_t carry = (x & sevens) + ones * (uint64_t)(0x80 - (c & 0x7F));
    m |= DS4_FN(tops)(c < 0x80 ? (x | carry) : (x & carry)) << (8 * i);
  }
  return m;
}

#endif

#if !defined(DS4_ISA_AVX512)
static inline DS4_FN(block) DS4_FN(load_part)(const uint8_t* p, int64_t n) {
  uint8_t padded[64] = {0};
  memcpy(padded, p, (size_t)n);
  return DS4_FN(load)(padded);
}
#endif

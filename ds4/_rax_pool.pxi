# Memory of one tree's nodes: slabs cut into size classes, released together.
#
#     sizes   16 | 32 | 64 | 128 | 192 | ... | LARGEST        larger ones come from malloc, linked in a ring
#     slab    |16|16| 32 | 64 ........ | 64 | 128 ..... |  at --> free end
#
# A block up to 64 bytes lies in one cache line, a larger one begins a line: general allocators put a header before
# their blocks, so that nearly every node would take two. Slabs of 2 MiB are huge pages where the system has them: a
# random walk over millions of bytes otherwise misses the page table cache as often as the caches.

cdef extern from *:
    """
    #include <sys/mman.h>

    enum { DS4_LINE = 64, DS4_HUGE = 1 << 21 };
    /* Under AddressSanitizer every node is an allocation of its own, so that it can tell one from the next. */
    #if defined(__SANITIZE_ADDRESS__)
    enum { DS4_LARGEST = 0 };
    #else
    enum { DS4_LARGEST = 21 * 64 };
    #endif

    static inline void ds4_huge_page(void* p) {
    #ifdef MADV_HUGEPAGE
      (void)madvise(p, DS4_HUGE, MADV_HUGEPAGE);
    #else
      (void)p;
    #endif
    }
    """
    Py_ssize_t LINE "DS4_LINE"
    Py_ssize_t HUGE "DS4_HUGE"
    Py_ssize_t LARGEST "DS4_LARGEST"
    void huge_page "ds4_huge_page" (void *p) noexcept nogil

cdef enum:
    CLASSES = 23
    FIRST_SLAB = 1024

cdef struct Link:
    Link *next
    Link *before

cdef struct Pool:
    char *at
    char *end
    Link *free[CLASSES]
    Link *slabs
    Link *large
    Py_ssize_t slab_size
    Py_ssize_t used         # bytes of all blocks handed out


cdef inline Py_ssize_t rounded(Py_ssize_t size) noexcept nogil:
    if size > LARGEST:
        return size
    return 16 if size <= 16 else 32 if size <= 32 else (size + LINE - 1) & ~(LINE - 1)


cdef inline int class_of(Py_ssize_t size) noexcept nogil:
    """Of a rounded size."""
    return <int>(size >> 5) if size <= 32 else <int>(1 + size // LINE)


cdef inline void keep(Pool *pool, void *p, int size_class) noexcept nogil:
    (<Link *>p).next = pool.free[size_class]
    pool.free[size_class] = <Link *>p


cdef void align(Pool *pool, Py_ssize_t size) noexcept nogil:
    """Moves `at` to where a block of `size` may begin; what is skipped becomes free blocks."""
    cdef Py_ssize_t step = min(size, LINE)
    cdef Py_ssize_t piece
    while <size_t>pool.at & (step - 1) and pool.at < pool.end:
        piece = 16 if <size_t>pool.at & 16 else 32
        keep(pool, pool.at, class_of(piece))
        pool.at += piece


cdef int new_slab(Pool *pool) except -1:
    """The next slab is four times the last one, up to huge pages. What was left of the last one is given up."""
    cdef Py_ssize_t size = FIRST_SLAB if not pool.slab_size else min(4 * pool.slab_size, HUGE)
    cdef Py_ssize_t step = HUGE if size == HUGE else LINE
    cdef Link *slab = <Link *>PyMem_RawMalloc(sizeof(Link) + step + size)
    if slab == NULL:
        raise MemoryError
    slab.next = pool.slabs
    pool.slabs = slab
    pool.slab_size = size
    pool.at = <char *>((<size_t>(slab + 1) + step - 1) & ~<size_t>(step - 1))
    pool.end = pool.at + size
    if size == HUGE:
        huge_page(pool.at)
    return 0


cdef void *take_block(Pool *pool, Py_ssize_t size) except NULL:
    """`size` is rounded."""
    cdef Link *p
    cdef int c
    if size > LARGEST:
        p = <Link *>PyMem_RawMalloc(sizeof(Link) + size)
        if p == NULL:
            raise MemoryError
        p.before = NULL
        p.next = pool.large
        if p.next != NULL:
            p.next.before = p
        pool.large = p
        pool.used += size
        return p + 1
    c = class_of(size)
    p = pool.free[c]
    if p != NULL:
        pool.free[c] = p.next
    else:
        align(pool, size)
        if pool.end - pool.at < size:
            new_slab(pool)
        p = <Link *>pool.at
        pool.at += size
    pool.used += size
    return p


cdef void give_block(Pool *pool, void *block, Py_ssize_t size) noexcept:
    cdef Link *p = <Link *>block
    pool.used -= size
    if size <= LARGEST:
        keep(pool, p, class_of(size))
        return
    p -= 1
    if p.next != NULL:
        p.next.before = p.before
    if p.before != NULL:
        p.before.next = p.next
    else:
        pool.large = p.next
    PyMem_RawFree(p)


cdef void free_all(Link *p) noexcept:
    cdef Link *following
    while p != NULL:
        following = p.next
        PyMem_RawFree(p)
        p = following


cdef void release(Pool *pool) noexcept:
    """Frees all blocks at once."""
    free_all(pool.slabs)
    free_all(pool.large)
    memset(pool, 0, sizeof(Pool))

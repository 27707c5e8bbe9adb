# Long strings of former bodies by their own bytes: a client sends its whole history again with every turn. A text that
# is known costs one reading of its bytes for the key and one for the comparison that makes sure.

cdef inline uint64_t fingerprint(const uint8_t* p, int64_t n) noexcept nogil:
    """A key for a table whose entries are compared in full: fast, and nothing else."""
    cdef uint64_t a = <uint64_t>n, b = 1, c = 2, d = 3
    cdef uint64_t word[4]
    cdef int64_t i = 0
    cdef uint64_t factor = 0x9E3779B97F4A7C15u
    while i + 32 <= n:
        memcpy(word, p + i, 32)
        a = (a ^ word[0]) * factor
        b = (b ^ word[1]) * factor
        c = (c ^ word[2]) * factor
        d = (d ^ word[3]) * factor
        # The product moves bits up only; what is at the top comes down again.
        a ^= a >> 29
        b ^= b >> 29
        c ^= c >> 29
        d ^= d >> 29
        i += 32
    if i < n:
        word[0] = word[1] = word[2] = word[3] = 0
        memcpy(word, p + i, n - i)
        a = (a ^ word[0]) * factor
        b = (b ^ word[1]) * factor
        c = (c ^ word[2]) * factor
        d = (d ^ word[3]) * factor
    a = ((a ^ (b >> 31) ^ b) * factor) ^ ((c ^ (d >> 31) ^ (d << 7)) * factor)
    return a ^ (a >> 32)


@cython.final
cdef class Texts:
    # Two generations: what is used moves into the young one; when that is half of all, it becomes the old one and the
    # old one is forgotten.
    cdef dict young
    cdef dict old
    cdef int64_t half
    cdef int64_t held
    cdef int64_t shortest

    def __init__(self, int64_t max_bytes, int64_t shortest=256):
        self.young = {}
        self.old = {}
        self.half = max_bytes // 2
        self.held = 0
        self.shortest = shortest

    def __len__(self):
        return len(self.young.keys() | self.old.keys())

    def read(self, Node node not None):
        cdef Tape tape = node.tape
        cdef const uint64_t* w = tape.t.words + node.at
        cdef const uint8_t* p = tape.t.body + ds4_tape_start(w)
        if p[0] != c'"':
            raise node.mismatch("str")
        cdef int64_t size = ds4_tape_second(w)
        if size < self.shortest:
            return string_at(tape, node.at)
        cdef object key = fingerprint(p, size)
        cdef object entry
        with cython.critical_section(self):
            entry = self.young.get(key)
            if entry is None:
                entry = self.old.get(key)
                if entry is not None:
                    self.put(key, entry)
        if entry is not None:
            raw = (<tuple>entry)[0]
            if PyBytes_GET_SIZE(raw) == size and memcmp(PyBytes_AS_STRING(raw), p, size) == 0:
                return (<tuple>entry)[1]
        text = string_at(tape, node.at)
        entry = (PyBytes_FromStringAndSize(<const char*>p, size), text)
        with cython.critical_section(self):
            self.put(key, entry)
        return text

    cdef object put(self, object key, object entry):
        cdef int64_t cost = cost_of(entry)
        if cost > self.half:
            return
        before = self.young.get(key)
        if before is not None:
            self.held -= cost_of(before)
        self.held += cost
        if self.held > self.half:
            self.young.pop(key, None)
            self.old = self.young
            self.young = {}
            self.held = cost
        self.young[key] = entry


cdef int64_t cost_of(object entry):
    """Bytes of the spelling and of the text, with what the objects around them take."""
    return 200 + PyBytes_GET_SIZE((<tuple>entry)[0]) + PyUnicode_GET_LENGTH((<tuple>entry)[1]) * PyUnicode_KIND(
        (<tuple>entry)[1]
    )

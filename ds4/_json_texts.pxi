# What was made of parts of former bodies, by their own bytes: a client sends its whole history again with every turn. A
# part that is known costs one reading of its bytes for the key and one for the comparison that makes sure.

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


cdef class Spans:
    # Two generations: what is used moves into the young one; when that is half of all, it becomes the old one and the
    # old one is forgotten. An entry is (bytes of the value, what was made of it, cost).
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

    def get(self, Node node not None):
        cdef Tape tape = node.tape
        cdef int64_t start = ds4_tape_start(tape.t.words + node.at)
        cdef int64_t size = ds4_tape_end(tape.t.body, tape.t.words, node.at) - start
        if size < self.shortest:
            return None
        value = made_before(self, tape, node.at, start + size)
        if value is None:
            value = self.known(fingerprint(tape.t.body + start, size), tape.t.body + start, size)
        if value is not None:
            note_made(self, tape, node.at, value)
        return value

    def put(self, Node node not None, value not None, int64_t cost):
        cdef Tape tape = node.tape
        cdef int64_t start = ds4_tape_start(tape.t.words + node.at)
        cdef int64_t size = ds4_tape_end(tape.t.body, tape.t.words, node.at) - start
        if size >= self.shortest:
            self.keep(fingerprint(tape.t.body + start, size), tape.t.body + start, size, value, cost)
            note_made(self, tape, node.at, value)

    def each(self, Node array not None, make not None, int64_t weight):
        cdef Tape tape = array.tape
        cdef int64_t at, last, start, size
        cdef const uint8_t* p
        if array.first() != c"[":
            raise array.mismatch("array")
        at = array.at + 2
        last = ds4_tape_second(tape.t.words + array.at)
        values = []
        while at < last:
            start = ds4_tape_start(tape.t.words + at)
            size = ds4_tape_end(tape.t.body, tape.t.words, at) - start
            value = made_before(self, tape, at, start + size)
            if value is not None:
                pass
            elif size < self.shortest:
                value = make(make_node(tape, at))
            else:
                p = tape.t.body + start
                key = fingerprint(p, size)
                value = self.known(key, p, size)
                if value is None:
                    value = make(make_node(tape, at))
                    self.keep(key, p, size, value, weight * size)
            note_made(self, tape, at, value)
            values.append(value)
            at = ds4_tape_next(tape.t.body, tape.t.words, at)
        return values

    cdef object known(self, object key, const uint8_t* p, int64_t size):
        """What was made of these bytes, None: nothing that is still there."""
        cdef object entry
        with cython.critical_section(self):
            entry = self.young.get(key)
            if entry is None:
                entry = self.old.get(key)
                if entry is not None:
                    self.add(key, <tuple>entry)
        if entry is None:
            return None
        raw = (<tuple>entry)[0]
        if PyBytes_GET_SIZE(raw) != size or memcmp(PyBytes_AS_STRING(raw), p, size) != 0:
            return None
        return (<tuple>entry)[1]

    cdef object keep(self, object key, const uint8_t* p, int64_t size, object value, int64_t cost):
        """`key` is the fingerprint of the bytes."""
        cdef tuple entry = (PyBytes_FromStringAndSize(<const char*>p, size), value, size + cost + ENTRY_COST)
        with cython.critical_section(self):
            self.add(key, entry)

    cdef object add(self, object key, tuple entry):
        cdef int64_t cost = entry[2]
        if cost > self.half:
            return
        before = self.young.get(key)
        if before is not None:
            self.held -= <int64_t>(<tuple>before)[2]
        self.held += cost
        if self.held > self.half:
            self.young.pop(key, None)
            self.old = self.young
            self.young = {}
            self.held = cost
        self.young[key] = entry


cdef enum:
    ENTRY_COST = 200    # of the objects around the bytes


@cython.final
cdef class Texts(Spans):
    def read(self, Node node not None):
        cdef Tape tape = node.tape
        cdef const uint64_t* w = tape.t.words + node.at
        cdef const uint8_t* p = tape.t.body + ds4_tape_start(w)
        if p[0] != c'"':
            raise node.mismatch("str")
        cdef int64_t size = ds4_tape_second(w)
        if size < self.shortest:
            return string_at(tape, node.at)
        key = fingerprint(p, size)
        text = self.known(key, p, size)
        if text is None:
            text = string_at(tape, node.at)
            self.keep(key, p, size, text, PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text))
        return text

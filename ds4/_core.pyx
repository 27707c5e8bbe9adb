# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, freethreading_compatible=True
"""Bytes and tokens on the hot path: SHA-1, incremental UTF-8, surrogates, stop strings, common prefixes, events.

Stop strings are a trie with failure links (Aho and Corasick 1975). For "ab" and "bc":

      root --a--> 1 --b--> 2*        2 fails to 3: the "b" may begin "bc"
        \\---b--> 3 --c--> 4*

The matcher is at the deepest node whose path ends the text so far. Invariants: the path of that node is exactly what
must be held back (it is the longest end of the text that begins a stop string), so nothing else is buffered; the work
is linear in text plus stop strings; the first node with an output is the match.

UTF-8: `pending` is empty or a well-formed, incomplete sequence (at most three bytes), so the end of the stream turns
it into one U+FFFD. Every string that comes out holds whole code points and no surrogates.

Free-threaded Python: functions share no state. Methods of one `Utf8Decoder` or `StopMatcher` run in its critical
section, those of one `Sha1` under its lock (they give up the GIL). A list of tokens is read inside its critical
section. A `Bell` is there for several threads.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 maxchar)
    object PyUnicode_FromOrdinal(int code)
    object PyUnicode_DecodeUTF8(const char* data, Py_ssize_t size, const char* errors)
    void* PyUnicode_DATA(object o)
    int PyUnicode_KIND(object o)
    Py_ssize_t PyUnicode_GET_LENGTH(object o)
    PyObject** PySequence_Fast_ITEMS(object o)
    Py_ssize_t PySequence_Fast_GET_SIZE(object o)


cdef extern from "../native/text/sha1.h" nogil:
    ctypedef struct ds4_sha1:
        pass
    bint ds4_sha1_use(int ni)
    void ds4_sha1_init(ds4_sha1* h)
    void ds4_sha1_update(ds4_sha1* h, const uint8_t* p, int64_t n)
    void ds4_sha1_digest(const ds4_sha1* h, uint8_t* digest)


cdef extern from "../native/text/utf8.h" nogil:
    int ds4_utf8_incomplete(const uint8_t* p, int64_t n)
    bint ds4_is_ascii(const uint8_t* p, int64_t n)
    int64_t ds4_utf8_measure(const uint8_t* p, const uint8_t* end, uint32_t* highest)
    void ds4_utf8_decode(const uint8_t* p, const uint8_t* end, int width, void* out)
    uint32_t ds4_char_next(int width, const void* data, int64_t* at, int64_t n)
    bint ds4_has_surrogates(int width, const void* data, int64_t n)


cdef extern from "../native/text/prefix.h" nogil:
    int64_t ds4_common_prefix(const uint8_t* a, const uint8_t* b, int64_t n)


cdef extern from *:
    """
    /* An exact int of one digit (30 bits), which every token id is, without a call. */
    static CYTHON_INLINE int ds4_brief_int(PyObject* o, int64_t* value) {
      if (!PyLong_Check(o)) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
      if (!PyUnstable_Long_IsCompact((PyLongObject*)o)) return 0;
      *value = PyUnstable_Long_CompactValue((PyLongObject*)o);
    #else
      {
        const Py_ssize_t size = Py_SIZE(o);
        if (size < -1 || size > 1) return 0;
        *value = size * (int64_t)((PyLongObject*)o)->ob_digit[0];
      }
    #endif
      return 1;
    }
    /* Both stop at the first item that is no such int (the second: or negative) and say how many there were. */
    static Py_ssize_t ds4_brief_ints(PyObject** items, Py_ssize_t n, int64_t* values) {
      Py_ssize_t i;
      for (i = 0; i < n; ++i) {
        if (n - i > 16) __builtin_prefetch(items[i + 16]);
        if (!ds4_brief_int(items[i], values + i)) break;
      }
      return i;
    }
    static Py_ssize_t ds4_brief_ids(PyObject** items, Py_ssize_t n, uint32_t* ids) {
      Py_ssize_t i;
      int64_t value;
      for (i = 0; i < n; ++i) {
        if (n - i > 16) __builtin_prefetch(items[i + 16]);
        if (!ds4_brief_int(items[i], &value) || value < 0) break;
        ids[i] = (uint32_t)value;
      }
      return i;
    }
    /* Sixteen ids make a block: they are converted beside the rounds of the block before. */
    #if defined(__x86_64__)
    typedef struct {
      PyObject** items;
      Py_ssize_t n;
      uint32_t words[2][16];
    } ds4_id_source;
    static inline const uint8_t* ds4_next_ids(void* from, int64_t block) {
      ds4_id_source* s = (ds4_id_source*)from;
      PyObject** items = s->items + 16 * block;
      uint32_t* words = s->words[block & 1];
      const int ahead = s->n - 16 * (Py_ssize_t)block >= 48;
      int64_t value = 0, all = 0;
      int i, good = 1;
      for (i = 0; i < 16; ++i) {
        if (ahead) __builtin_prefetch(items[i + 32]);
        good &= ds4_brief_int(items[i], &value);
        all |= value;
        words[i] = (uint32_t)value;
      }
      return good && all >= 0 ? (const uint8_t*)words : NULL;
    }
    DS4_SHA1_NI static Py_ssize_t ds4_hash_ids_ni(ds4_sha1* h, PyObject** items, Py_ssize_t n) {
      ds4_id_source s = {items, n, {{0}}};
      return 16 * (Py_ssize_t)ds4_sha1_from_ni(h->state, ds4_next_ids, &s, n / 16);
    }
    static inline const uint8_t* ds4_next_signed(void* from, int64_t block) {
      const int32_t* words = (const int32_t*)from + 16 * block;
      int32_t all = 0;
      int i;
      for (i = 0; i < 16; ++i) all |= words[i];
      return all >= 0 ? (const uint8_t*)words : NULL;
    }
    DS4_SHA1_NI static Py_ssize_t ds4_hash_signed_ni(ds4_sha1* h, const int32_t* p, Py_ssize_t n) {
      return 16 * (Py_ssize_t)ds4_sha1_from_ni(h->state, ds4_next_signed, (void*)p, n / 16);
    }
    #endif
    /* Hashes ids in whole blocks up to the first that needs another way; says how many. */
    static Py_ssize_t ds4_hash_ids(ds4_sha1* h, PyObject** items, Py_ssize_t n) {
      Py_ssize_t done = 0;
    #if defined(__x86_64__)
      if (ds4_sha1_blocks == ds4_sha1_blocks_ni && h->size % 64 == 0) done = ds4_hash_ids_ni(h, items, n);
      h->size += 4 * (uint64_t)done;
    #endif
      return done;
    }
    static int ds4_any_negative(const int32_t* p, Py_ssize_t n) {
      uint32_t any[16] = {0}, all = 0;
      int k;
      for (; n >= 16; p += 16, n -= 16) {
        for (k = 0; k < 16; ++k) any[k] |= (uint32_t)p[k];
      }
      for (; n > 0; ++p, --n) all |= (uint32_t)*p;
      for (k = 0; k < 16; ++k) all |= any[k];
      return all >> 31;
    }
    /* Hashes ids in pieces that stay in the first cache, up to a piece with a negative one; says how many. */
    static Py_ssize_t ds4_hash_signed(ds4_sha1* h, const int32_t* p, Py_ssize_t n) {
      Py_ssize_t done = 0;
    #if defined(__x86_64__)
      if (ds4_sha1_blocks == ds4_sha1_blocks_ni && h->size % 64 == 0) done = ds4_hash_signed_ni(h, p, n);
      h->size += 4 * (uint64_t)done;
    #endif
      while (done < n) {
        const Py_ssize_t some = n - done < 1024 ? n - done : 1024;
        if (ds4_any_negative(p + done, some)) break;
        ds4_sha1_update(h, (const uint8_t*)(p + done), 4 * (int64_t)some);
        done += some;
      }
      return done;
    }
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    enum { DS4_LITTLE_ENDIAN = 1 };
    #else
    enum { DS4_LITTLE_ENDIAN = 0 };
    #endif
    """
    Py_ssize_t ds4_brief_ints(PyObject** items, Py_ssize_t n, int64_t* values) noexcept
    Py_ssize_t ds4_brief_ids(PyObject** items, Py_ssize_t n, uint32_t* ids) noexcept
    Py_ssize_t ds4_hash_ids(ds4_sha1* h, PyObject** items, Py_ssize_t n) noexcept
    Py_ssize_t ds4_hash_signed(ds4_sha1* h, const int32_t* p, Py_ssize_t n) noexcept nogil
    int DS4_LITTLE_ENDIAN

cdef enum:
    LONG_WORK = 65536   # bytes from which the GIL is given up: about 30 us of SHA-1
    CHUNK = 1024        # tokens converted at a time

MAX_STOP_BYTES = 1 << 20


# ---- token sequences -------------------------------------------------------------------------------------------


cdef struct Tokens:
    # Items of a list or tuple (width 0), or integers of 4 or 8 bytes.
    PyObject** items
    const uint8_t* data
    int width
    bint signed
    Py_ssize_t n
    bint has_view
    Py_buffer view


cdef int open_tokens(object tokens, Tokens* t) except -1:
    cdef bytes code
    t.has_view = False
    t.items = NULL
    t.width = 0
    if PyList_CheckExact(tokens) or PyTuple_CheckExact(tokens):
        t.items = PySequence_Fast_ITEMS(tokens)
        t.n = PySequence_Fast_GET_SIZE(tokens)
        return 0
    try:
        PyObject_GetBuffer(tokens, &t.view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except (TypeError, BufferError, ValueError):
        raise TypeError(
            f"token ids must be a list, a tuple or a contiguous integer buffer, not {type(tokens).__name__}"
        ) from None
    t.has_view = True
    code = t.view.format if t.view.format != NULL else b"B"
    code = code.lstrip(b"@=<" if DS4_LITTLE_ENDIAN else b"@=>!")
    if t.view.ndim != 1 or t.view.itemsize not in (4, 8) or code not in (b"i", b"I", b"l", b"L", b"q", b"Q"):
        shape = f"{t.view.ndim}-dimensional buffer of format {code.decode(errors='replace')!r}"
        PyBuffer_Release(&t.view)
        raise TypeError(f"token ids must be a one-dimensional buffer of 4 or 8 byte integers, not a {shape}")
    if t.view.shape[0] > 0 and <size_t>t.view.buf % t.view.itemsize:
        PyBuffer_Release(&t.view)
        raise TypeError("token ids are not aligned in their buffer")
    t.data = <const uint8_t*>t.view.buf
    t.width = t.view.itemsize
    t.signed = code.islower()
    t.n = t.view.shape[0]
    return 0


cdef void close_tokens(Tokens* t) noexcept:
    if t.has_view:
        t.has_view = False
        PyBuffer_Release(&t.view)


cdef int read_tokens(object owner, Tokens* t, Py_ssize_t start, Py_ssize_t n, int64_t* out) except -1:
    """n token ids from `start` as int64. Raises TypeError for a non-integer, OverflowError beyond 64 bits."""
    cdef Py_ssize_t i
    cdef const int32_t* narrow
    cdef const uint32_t* narrow_unsigned
    cdef const int64_t* wide
    if t.width == 0:
        i = 0
        while True:
            # `__index__` of a foreign item may have changed the list.
            if start + n > PySequence_Fast_GET_SIZE(owner):
                raise RuntimeError("list of token ids changed while it was read")
            t.items = PySequence_Fast_ITEMS(owner)
            i += ds4_brief_ints(t.items + start + i, n - i, out + i)
            if i == n:
                break
            out[i] = PyNumber_Index(<object>t.items[start + i])
            i += 1
    elif t.width == 4 and t.signed:
        narrow = <const int32_t*>t.data + start
        for i in range(n):
            out[i] = narrow[i]
    elif t.width == 4:
        narrow_unsigned = <const uint32_t*>t.data + start
        for i in range(n):
            out[i] = narrow_unsigned[i]
    else:
        wide = <const int64_t*>t.data + start
        for i in range(n):
            out[i] = wide[i]
            if wide[i] < 0 and not t.signed:
                raise OverflowError(f"token id at {start + i} has more than 63 bits")
    return 0


cdef int hash_tokens(ds4_sha1* h, object tokens) except -1:
    cdef Tokens t
    cdef int64_t ids[CHUNK]
    cdef uint32_t words[CHUNK]
    cdef Py_ssize_t at = 0, n, i
    cdef uint64_t any_high
    open_tokens(tokens, &t)
    try:
        if t.width == 4 and DS4_LITTLE_ENDIAN:
            if t.signed:
                if 4 * t.n >= LONG_WORK:
                    with nogil:
                        at = ds4_hash_signed(h, <const int32_t*>t.data, t.n)
                else:
                    at = ds4_hash_signed(h, <const int32_t*>t.data, t.n)
                for i in range(at, t.n):
                    if (<const int32_t*>t.data)[i] < 0:
                        raise ValueError(f"token id {(<const int32_t*>t.data)[i]} at {i} is negative")
                return 0
            if 4 * t.n >= LONG_WORK:
                with nogil:
                    ds4_sha1_update(h, t.data, 4 * t.n)
            else:
                ds4_sha1_update(h, t.data, 4 * t.n)
            return 0
        with cython.critical_section(tokens):
            if t.width == 0 and DS4_LITTLE_ENDIAN and t.n <= PySequence_Fast_GET_SIZE(tokens):
                at = ds4_hash_ids(h, PySequence_Fast_ITEMS(tokens), t.n)
            while at < t.n:
                n = min(<Py_ssize_t>CHUNK, t.n - at)
                if t.width == 0 and DS4_LITTLE_ENDIAN and at + n <= PySequence_Fast_GET_SIZE(tokens):
                    if ds4_brief_ids(PySequence_Fast_ITEMS(tokens) + at, n, words) == n:
                        ds4_sha1_update(h, <const uint8_t*>words, 4 * n)
                        at += n
                        continue
                read_tokens(tokens, &t, at, n, ids)
                any_high = 0
                for i in range(n):
                    any_high |= <uint64_t>ids[i]
                if any_high >> 32:
                    for i in range(n):
                        if <uint64_t>ids[i] >> 32:
                            raise ValueError(f"token id {ids[i]} at {at + i} is outside of 0 .. 2**32 - 1")
                if DS4_LITTLE_ENDIAN:
                    for i in range(n):
                        words[i] = <uint32_t>ids[i]
                else:
                    for i in range(4 * n):
                        (<uint8_t*>words)[i] = <uint8_t>(ids[i >> 2] >> (8 * (i & 3)))
                ds4_sha1_update(h, <const uint8_t*>words, 4 * n)
                at += n
        return 0
    finally:
        close_tokens(&t)


# ---- SHA-1 -----------------------------------------------------------------------------------------------------

SHA1_BACKEND = "sha-ni" if ds4_sha1_use(1) else "portable"


def use_sha1(str name not None):
    """Chooses "sha-ni" or "portable"; for tests. Raises ValueError for what this CPU lacks."""
    global SHA1_BACKEND
    if name not in ("sha-ni", "portable") or not ds4_sha1_use(name == "sha-ni"):
        raise ValueError(f"SHA-1 by {name!r} is not available on this CPU")
    before = SHA1_BACKEND
    SHA1_BACKEND = name
    return before


cdef int hash_bytes(ds4_sha1* h, object data) except -1:
    cdef Py_buffer view
    if type(data) is bytes and PyBytes_GET_SIZE(data) < LONG_WORK:
        ds4_sha1_update(h, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        return 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len >= LONG_WORK:
            with nogil:
                ds4_sha1_update(h, <const uint8_t*>view.buf, view.len)
        else:
            ds4_sha1_update(h, <const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return 0


cdef bytes digest_of(const ds4_sha1* h):
    digest = PyBytes_FromStringAndSize(NULL, 20)
    ds4_sha1_digest(h, <uint8_t*>PyBytes_AS_STRING(digest))
    return digest


def sha1(data):
    cdef ds4_sha1 h
    ds4_sha1_init(&h)
    hash_bytes(&h, data)
    return digest_of(&h)


def sha1_hex(data):
    return sha1(data).hex()


def sha1_tokens(tokens):
    cdef ds4_sha1 h
    ds4_sha1_init(&h)
    hash_tokens(&h, tokens)
    return digest_of(&h)


@cython.final
cdef class Sha1:
    cdef ds4_sha1 h
    cdef cython.pymutex lock

    def __cinit__(self):
        ds4_sha1_init(&self.h)

    def __init__(self, data=b""):
        self.update(data)

    def update(self, data):
        with self.lock:
            hash_bytes(&self.h, data)

    def update_tokens(self, tokens):
        cdef ds4_sha1 before
        with self.lock:
            before = self.h
            try:
                hash_tokens(&self.h, tokens)
            except BaseException:
                self.h = before
                raise

    def digest(self):
        with self.lock:
            return digest_of(&self.h)

    def hexdigest(self):
        return self.digest().hex()

    def copy(self):
        cdef Sha1 other = Sha1()
        with self.lock:
            other.h = self.h
        return other


# ---- UTF-8 -----------------------------------------------------------------------------------------------------


cdef object decode(const uint8_t* p, int64_t n):
    """All these bytes as str, ill-formed ones replaced."""
    cdef uint32_t highest
    cdef int64_t chars
    if n == 0:
        return ""
    chars = ds4_utf8_measure(p, p + n, &highest)
    text = PyUnicode_New(chars, 0x7F if highest < 0x80 else 0xFF if highest < 0x100 else 0xFFFF if highest < 0x10000 else 0x10FFFF)
    ds4_utf8_decode(p, p + n, PyUnicode_KIND(text), PyUnicode_DATA(text))
    return text


@cython.final
cdef class Utf8Decoder:
    cdef uint8_t held[4]
    cdef int n_held

    @cython.critical_section
    def feed(self, bytes data not None):
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
        cdef int cut
        cdef bytes joined
        if self.n_held == 0:
            if ds4_is_ascii(p, n):
                if n == 1:
                    return PyUnicode_FromOrdinal(p[0])
                text = PyUnicode_New(n, 0x7F)
                memcpy(PyUnicode_DATA(text), p, n)
                return text
        elif n > 0:
            joined = PyBytes_FromStringAndSize(NULL, self.n_held + n)
            memcpy(PyBytes_AS_STRING(joined), self.held, self.n_held)
            memcpy(PyBytes_AS_STRING(joined) + self.n_held, p, n)
            p = <const uint8_t*>PyBytes_AS_STRING(joined)
            n += self.n_held
        else:
            return ""
        cut = ds4_utf8_incomplete(p, n)
        text = decode(p, n - cut)
        memcpy(self.held, p + n - cut, cut)
        self.n_held = cut
        return text

    @cython.critical_section
    def finish(self):
        if self.n_held == 0:
            return ""
        self.n_held = 0
        return "\ufffd"

    @property
    @cython.critical_section
    def pending(self):
        return PyBytes_FromStringAndSize(<const char*>self.held, self.n_held)


def repair_surrogates(str text not None):
    cdef int width = PyUnicode_KIND(text)
    cdef const void* data = PyUnicode_DATA(text)
    cdef int64_t n = PyUnicode_GET_LENGTH(text)
    cdef int64_t at = 0, chars = 0
    cdef uint32_t code, highest = 0
    cdef int out_width
    cdef void* out
    if not ds4_has_surrogates(width, data, n):
        return text
    while at < n:
        code = ds4_char_next(width, data, &at, n)
        highest = max(highest, code)
        chars += 1
    # A surrogate was there, so the highest character is U+FFFD or above the BMP.
    repaired = PyUnicode_New(chars, 0xFFFF if highest < 0x10000 else 0x10FFFF)
    out = PyUnicode_DATA(repaired)
    out_width = PyUnicode_KIND(repaired)
    at = chars = 0
    while at < n:
        code = ds4_char_next(width, data, &at, n)
        if out_width == 2:
            (<unsigned short*>out)[chars] = <unsigned short>code
        else:
            (<uint32_t*>out)[chars] = code
        chars += 1
    return repaired


# ---- stop strings ----------------------------------------------------------------------------------------------


cdef struct StopNode:
    int32_t child       # first child, 0: none
    int32_t sibling     # next child of the parent, 0: none
    int32_t fail        # node of the longest proper end of this path that is a path
    int32_t depth
    int32_t stop        # a stop string that begins with this path
    int32_t output      # the longest stop string that ends this path, -1: none
    uint8_t byte


cdef inline int32_t child_of(const StopNode* nodes, int32_t node, uint8_t byte) noexcept nogil:
    cdef int32_t child = nodes[node].child
    while child != 0 and nodes[child].byte != byte:
        child = nodes[child].sibling
    return child


@cython.final
cdef class StopMatcher:
    cdef tuple stops
    cdef bytes found
    cdef StopNode* nodes
    cdef int32_t root[256]
    cdef int32_t at

    def __cinit__(self, stops):
        cdef Py_ssize_t total = 0
        cdef bytes stop
        self.stops = tuple([s for s in stops if len(s) > 0])
        for stop in self.stops:
            total += len(stop)
        if total > MAX_STOP_BYTES:
            raise ValueError(f"stop strings have {total} bytes together, at most {MAX_STOP_BYTES} are allowed")
        self.nodes = <StopNode*>PyMem_Calloc(total + 1, sizeof(StopNode))
        if self.nodes == NULL:
            raise MemoryError
        self.build(total + 1)

    def __dealloc__(self):
        PyMem_Free(self.nodes)

    cdef int build(self, Py_ssize_t capacity) except -1:
        cdef StopNode* nodes = self.nodes
        cdef int32_t n = 1, node, child, k = 0
        cdef Py_ssize_t i, head = 0, tail = 0
        cdef bytes stop
        cdef uint8_t byte
        cdef int32_t* queue = <int32_t*>PyMem_Calloc(capacity, sizeof(int32_t))
        if queue == NULL:
            raise MemoryError
        nodes[0].output = -1
        for k, stop in enumerate(self.stops):
            node = 0
            for i in range(PyBytes_GET_SIZE(stop)):
                byte = <uint8_t>PyBytes_AS_STRING(stop)[i]
                child = child_of(nodes, node, byte)
                if child == 0:
                    child = n
                    n += 1
                    nodes[child].byte = byte
                    nodes[child].depth = <int32_t>(i + 1)
                    nodes[child].stop = k
                    nodes[child].output = -1
                    nodes[child].sibling = nodes[node].child
                    nodes[node].child = child
                node = child
            nodes[node].output = k
        # Breadth first: the failure link of a node needs those of all shallower ones.
        child = nodes[0].child
        while child != 0:
            self.root[nodes[child].byte] = child
            queue[tail] = child
            tail += 1
            child = nodes[child].sibling
        while head < tail:
            node = queue[head]
            head += 1
            if nodes[node].output < 0:
                nodes[node].output = nodes[nodes[node].fail].output
            child = nodes[node].child
            while child != 0:
                nodes[child].fail = self.step(nodes[node].fail, nodes[child].byte)
                queue[tail] = child
                tail += 1
                child = nodes[child].sibling
        PyMem_Free(queue)
        return 0

    cdef inline int32_t step(self, int32_t node, uint8_t byte) noexcept nogil:
        cdef int32_t child
        while node != 0:
            child = child_of(self.nodes, node, byte)
            if child != 0:
                return child
            node = self.nodes[node].fail
        return self.root[byte]

    cdef bytes take(self, int32_t node, bytes data, Py_ssize_t n):
        """The first n bytes of what is held at `node` and `data` together."""
        cdef Py_ssize_t held = self.nodes[node].depth
        cdef bytes stop
        cdef bytes text
        if n <= 0:
            return b""
        if held == 0:
            return data if n == PyBytes_GET_SIZE(data) else PyBytes_FromStringAndSize(PyBytes_AS_STRING(data), n)
        stop = self.stops[self.nodes[node].stop]
        text = PyBytes_FromStringAndSize(NULL, n)
        memcpy(PyBytes_AS_STRING(text), PyBytes_AS_STRING(stop), min(held, n))
        if n > held:
            memcpy(PyBytes_AS_STRING(text) + held, PyBytes_AS_STRING(data), n - held)
        return text

    @cython.critical_section
    def feed(self, bytes data not None):
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(data), i
        cdef int32_t before = self.at, node = self.at, k
        if self.found is not None:
            return b"", self.found
        for i in range(n):
            node = self.step(node, p[i])
            k = self.nodes[node].output
            if k >= 0:
                self.found = self.stops[k]
                self.at = 0
                return self.take(before, data, self.nodes[before].depth + i + 1 - PyBytes_GET_SIZE(self.found)), self.found
        self.at = node
        return self.take(before, data, self.nodes[before].depth + n - self.nodes[node].depth), None

    @cython.critical_section
    def finish(self):
        cdef int32_t node = self.at
        self.at = 0
        return self.take(node, b"", self.nodes[node].depth)

    @property
    def matched(self):
        return self.found

    @property
    def held(self):
        return self.nodes[self.at].depth


# ---- common prefixes -------------------------------------------------------------------------------------------


cdef int64_t prefix_length(const uint8_t* a, const uint8_t* b, int64_t n) noexcept:
    cdef int64_t same
    if n < 16 * LONG_WORK:
        return ds4_common_prefix(a, b, n)
    with nogil:
        same = ds4_common_prefix(a, b, n)
    return same


def prefixed_strings(data, Py_ssize_t at, Py_ssize_t count):
    cdef Py_buffer view
    cdef const uint8_t* p
    cdef uint64_t size
    cdef list found = []
    cdef int i
    if at < 0:
        raise ValueError(f"offset {at}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while count > 0 and at <= view.len - 8:
            p = <const uint8_t*>view.buf + at
            size = 0
            for i in range(8):
                size |= <uint64_t>p[i] << (8 * i)
            if size > <uint64_t>(view.len - at - 8):
                break
            found.append(PyUnicode_DecodeUTF8(<const char*>p + 8, <Py_ssize_t>size, "replace"))
            at += 8 + <Py_ssize_t>size
            count -= 1
        return found, at
    finally:
        PyBuffer_Release(&view)


def common_prefix(a, b):
    cdef Py_buffer x, y
    PyObject_GetBuffer(a, &x, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(b, &y, PyBUF_SIMPLE)
        try:
            return prefix_length(<const uint8_t*>x.buf, <const uint8_t*>y.buf, min(x.len, y.len))
        finally:
            PyBuffer_Release(&y)
    finally:
        PyBuffer_Release(&x)


def is_prefix(prefix, data):
    cdef Py_buffer x, y
    PyObject_GetBuffer(prefix, &x, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(data, &y, PyBUF_SIMPLE)
        try:
            return x.len <= y.len and prefix_length(<const uint8_t*>x.buf, <const uint8_t*>y.buf, x.len) == x.len
        finally:
            PyBuffer_Release(&y)
    finally:
        PyBuffer_Release(&x)


cdef Py_ssize_t prefix_of_tokens(object a, object b, Tokens* x, Tokens* y) except -1:
    cdef int64_t left[CHUNK]
    cdef int64_t right[CHUNK]
    cdef Py_ssize_t n = min(x.n, y.n), at = 0, some = 16
    cdef int64_t same
    if x.width > 0 and x.width == y.width and x.signed == y.signed:
        return prefix_length(x.data, y.data, n * x.width) // x.width
    while at < n:
        some = min(some, n - at)
        read_tokens(a, x, at, some, left)
        read_tokens(b, y, at, some, right)
        same = ds4_common_prefix(<const uint8_t*>left, <const uint8_t*>right, 8 * some) // 8
        at += same
        if same < some:
            break
        some = CHUNK
    return at


def common_prefix_tokens(a, b):
    cdef Tokens x, y
    open_tokens(a, &x)
    try:
        open_tokens(b, &y)
        try:
            with cython.critical_section(a, b):
                return prefix_of_tokens(a, b, &x, &y)
        finally:
            close_tokens(&y)
    finally:
        close_tokens(&x)


def tokens_below(tokens, int64_t limit):
    cdef Tokens t
    cdef int64_t ids[CHUNK]
    cdef Py_ssize_t at = 0, n, i
    cdef bint inside = True
    open_tokens(tokens, &t)
    try:
        with cython.critical_section(tokens):
            while inside and at < t.n:
                n = min(t.n - at, CHUNK)
                read_tokens(tokens, &t, at, n, ids)
                for i in range(n):
                    inside &= (ids[i] >= 0) & (ids[i] < limit)
                at += n
        return inside
    finally:
        close_tokens(&t)


include "_core_events.pxi"
include "_core_join.pxi"
include "_core_bell.pxi"

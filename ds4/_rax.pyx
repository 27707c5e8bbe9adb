# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compressed radix tree: an ordered map from bytes to objects that answers prefix questions.

With the keys "call_1a", "call_1b", "call_2", "cat" (`*` marks a key's end):

    root --c--> "a" --l--> "l_" --1--> "" --a--> "" *
                 |            |         +---b--> "" *
                 |            +-----2--> "" *
                 +---t--> "" *

A node holds the bytes that all keys below it share after its edge. Inserting "cart" splits nothing: it adds the edge
"r". Inserting "ca" marks the node "a". Inserting "cold" splits that node: "" with the edges "a" and "o".

    node:  | length, n, level, room | value, slot | edge bytes | child pointers | hints | shared bytes |
             8 bytes                  12, if room   cap, padded  cap * 8          cap * 4, if cap <= 4

What a look-up costs is the cache lines that it must wait for. So `_rax_pool.pxi` places the nodes in lines; only a node
that has or had a key has room for one; a node of four children takes one line, and so does the leaf of a key whose last
44 bytes are its own. The lines of a wide child are fetched together. A hint tells where the value of a child's key
lies, so that the leaf and its value are fetched together.

Invariants:

* Edge bytes of a node are strictly ascending, so that a walk in edge order gives keys in byte order.
* Every node but the root has a key or at least two children. Hence there are fewer than two nodes per key, and no
  path is longer than the number of keys or the longest key.
* The root shares no bytes and always exists.
* A key's value is `values[slot]`: values belong to an ordinary list, which the garbage collector knows. A slot is
  either of one node or in `free`. The node's `value` is the same pointer, borrowed: it saves a cache miss, and holds
  as long as the list has not been emptied by the collector.
* All nodes are of the tree's own pool and end with it.
* A hint is never followed, only prefetched: it may be stale, and it lacks the upper bits, which values mostly share.
* A failed allocation changes nothing: everything is allocated before the first pointer is moved.
* An old value is released after the tree is whole again, because its finalizer may use the tree.

No operation recurses, so that a path of a million nodes is no danger to the stack. Each method holds the tree's lock
where Python runs without the GIL; `version` tells an iterator that the tree has changed.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_RawFree, PyMem_RawMalloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcmp, memcpy, memmove, memset

include "_rax_pool.pxi"


cdef extern from "../native/text/byte_search.h" nogil:
    int ds4_byte_index(const uint8_t *p, int n, uint8_t byte)


cdef extern from *:
    """
    #define ds4_prefetch(p) __builtin_prefetch(p)
    """
    void prefetch "ds4_prefetch" (const void *p) noexcept nogil


# Lengths and slots are 32 bits wide; `put` checks both.
cdef Py_ssize_t MAX_KEY = 0xFFFFFFFF
cdef uint32_t NO_KEY = 0xFFFFFFFF

cdef struct Node:
    uint32_t length
    uint16_t n
    uint8_t level           # room for 2**level children, none if 0
    uint8_t room            # is there a Key behind this?

cdef struct Key:
    PyObject *value
    uint32_t slot

cdef struct Frame:
    Node *node
    int next
    Py_ssize_t key_length

cdef enum:
    HEADER = 8
    KEY = 12


cdef inline uint32_t slot_of(Node *x) noexcept nogil:
    return (<Key *>(x + 1)).slot if x.room else NO_KEY


cdef inline PyObject *value_of(Node *x) noexcept nogil:
    return (<Key *>(x + 1)).value if x.room else NULL


cdef inline void set_key(Node *x, uint32_t slot, PyObject *value) noexcept nogil:
    """The node has room."""
    (<Key *>(x + 1)).slot = slot
    (<Key *>(x + 1)).value = value


cdef inline int cap_of(int level) noexcept nogil:
    return 1 << level if level else 0


cdef inline uint8_t *edges(Node *x) noexcept nogil:
    return <uint8_t *>x + HEADER + x.room * KEY


cdef inline bint hinted(int level) noexcept nogil:
    return level == 1 or level == 2


cdef inline Py_ssize_t size_of(bint room, int level, Py_ssize_t length) noexcept nogil:
    cdef int cap = cap_of(level)
    cdef Py_ssize_t size = HEADER + room * KEY
    if level:
        size = ((size + cap + 7) & ~7) + cap * <Py_ssize_t>sizeof(Node *)
        if hinted(level):
            size += cap * <Py_ssize_t>sizeof(uint32_t)
    return size + length


cdef inline Py_ssize_t block_of(Node *x) noexcept nogil:
    """Bytes that the node takes in the pool."""
    return rounded(size_of(x.room, x.level, x.length))


cdef inline Node **children(Node *x) noexcept nogil:
    return <Node **>(<char *>x + ((HEADER + x.room * KEY + cap_of(x.level) + 7) & ~7))


cdef inline uint32_t *hints(Node *x) noexcept nogil:
    """Of a hinted node."""
    return <uint32_t *>(children(x) + cap_of(x.level))


cdef inline uint32_t hint_to(PyObject *value) noexcept nogil:
    return <uint32_t>(<size_t>value >> 4)


cdef inline char *shared(Node *x) noexcept nogil:
    return <char *>x + size_of(x.room, x.level, 0)


cdef inline Node **child_at(Node *x, uint8_t edge) noexcept nogil:
    """The link that `edge` stands for, or NULL."""
    # The search may read 15 bytes behind the edges; the pointers of two children are at least as many.
    cdef int i = ds4_byte_index(edges(x), x.n, edge)
    return children(x) + i if i >= 0 else NULL


cdef inline void fetch(Node *x) noexcept nogil:
    """What follows the node's first line, which the caller is about to read, comes with it."""
    prefetch(<char *>x + LINE)
    prefetch(<char *>x + 2 * LINE)


cdef inline Py_ssize_t common(const char *a, const char *b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i = 0
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef Node *new_node(Pool *pool, bint room, int level, Py_ssize_t length) except NULL:
    """Without children; the key and the shared bytes are the caller's to write."""
    cdef Node *x = <Node *>take_block(pool, rounded(size_of(room, level, length)))
    x.length = <uint32_t>length
    x.n = 0
    x.level = level
    x.room = room
    if room:
        set_key(x, NO_KEY, NULL)
    return x


cdef inline void drop_node(Pool *pool, Node *x) noexcept:
    give_block(pool, x, block_of(x))


cdef inline void take_over(Node *y, Node *x) noexcept nogil:
    """Gives `y`, which has room for them, the key and the children of `x`."""
    if y.room:
        set_key(y, slot_of(x), value_of(x))
    y.n = x.n
    memcpy(children(y), children(x), x.n * sizeof(Node *))
    memcpy(edges(y), edges(x), x.n)
    if hinted(x.level) and hinted(y.level):
        memcpy(hints(y), hints(x), x.n * sizeof(uint32_t))
    elif hinted(y.level):
        memset(hints(y), 0, x.n * sizeof(uint32_t))


cdef Node *resized(Pool *pool, Node *x, bint room, int level) except NULL:
    """A copy of `x` with room for 2**level children, and for a key."""
    cdef Node *y = new_node(pool, room, level, x.length)
    take_over(y, x)
    memcpy(shared(y), shared(x), x.length)
    return y


cdef void put_child(Node *x, uint8_t edge, Node *child) noexcept nogil:
    """Adds a child where there is room, keeping the edges in order."""
    cdef uint8_t *e = edges(x)
    cdef Node **c = children(x)
    cdef int i = x.n
    while i > 0 and e[i - 1] > edge:
        e[i] = e[i - 1]
        c[i] = c[i - 1]
        if hinted(x.level):
            hints(x)[i] = hints(x)[i - 1]
        i -= 1
    e[i] = edge
    c[i] = child
    if hinted(x.level):
        hints(x)[i] = hint_to(value_of(child))
    x.n += 1


@cython.final
@cython.no_gc_clear
cdef class Rax:
    cdef Node *root
    cdef list values
    cdef Py_ssize_t *free
    cdef Py_ssize_t n_free, cap_free
    cdef Py_ssize_t count
    cdef unsigned long long version
    cdef size_t high         # upper bits of the last value's address, which the hints lack
    cdef Pool pool

    def __cinit__(self):
        self.values = []
        self.root = new_node(&self.pool, False, 0, 0)

    def __init__(self):
        pass

    def __dealloc__(self):
        release(&self.pool)
        PyMem_Free(self.free)

    @classmethod
    def __class_getitem__(cls, item):
        return cls

    # ---- look-up ------------------------------------------------------------------------------------------------

    cdef inline Node *below(self, Node *x, uint8_t edge) noexcept nogil:
        """The child behind `edge`, or NULL; its lines and its value are on their way."""
        cdef int i = ds4_byte_index(edges(x), x.n, edge)
        cdef Node *child
        if i < 0:
            return NULL
        child = children(x)[i]
        if hinted(x.level):
            prefetch(<void *>(self.high | <size_t>hints(x)[i] << 4))
        else:
            fetch(child)
        return child

    cdef Node *node_of(self, const char *key, Py_ssize_t n) noexcept nogil:
        """The node at which `key` ends as a key, or NULL."""
        cdef Node *x = self.root
        cdef Py_ssize_t i = 0
        prefetch(key + LINE // 2)    # with the 32 bytes of its header, a key of up to 64 bytes is in two lines
        while True:
            if x.length:
                if n - i < x.length or memcmp(shared(x), key + i, x.length) != 0:
                    return NULL
                i += x.length
            if i == n:
                return x if slot_of(x) != NO_KEY else NULL
            x = self.below(x, key[i])
            if x == NULL:
                return NULL
            i += 1

    cdef object value_at(self, Node *x):
        if slot_of(x) >= PyList_GET_SIZE(self.values):
            self.alive()
        return <object>value_of(x)

    @cython.critical_section
    def find(self, bytes key not None, default=None):
        cdef Node *x = self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        return self.value_at(x) if x != NULL else default

    @cython.critical_section
    def __getitem__(self, bytes key not None):
        cdef Node *x = self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        if x == NULL:
            raise KeyError(key)
        return self.value_at(x)

    @cython.critical_section
    def __contains__(self, bytes key not None):
        return self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) != NULL

    def __len__(self):
        return self.count

    @property
    def memory(self):
        return self.pool.used

    @cython.critical_section
    def longest_prefix(self, bytes query not None, Py_ssize_t start=0):
        cdef const char *p = PyBytes_AS_STRING(query)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(query), i, best_at = 0
        cdef Node *x = self.root
        cdef Node *best = NULL
        if not 0 <= start <= n:
            raise ValueError(f"start: expected 0 to {n}, got {start}")
        i = start
        prefetch(p + start + LINE // 2)
        while True:
            if x.length:
                if n - i < x.length or memcmp(shared(x), p + i, x.length) != 0:
                    break
                i += x.length
            if slot_of(x) != NO_KEY:
                best = x
                best_at = i
            if i == n:
                break
            x = self.below(x, p[i])
            if x == NULL:
                break
            i += 1
        if best == NULL:
            return None
        if start == 0 and best_at == n:
            return (query, self.value_at(best))
        return (PyBytes_FromStringAndSize(p + start, best_at - start), self.value_at(best))

    # ---- change -------------------------------------------------------------------------------------------------

    cdef int alive(self) except -1:
        # The collector breaks a cycle by emptying the list; a finalizer may still hold the tree.
        if PyList_GET_SIZE(self.values) != self.count + self.n_free:
            raise RuntimeError("the tree was cleared by the garbage collector")
        return 0

    cdef Py_ssize_t take_slot(self, object value) except -1:
        cdef Py_ssize_t slot
        if self.count >= MAX_KEY:
            raise OverflowError(f"keys: expected at most {MAX_KEY}")
        if self.n_free:
            slot = self.free[self.n_free - 1]
            self.values[slot] = value
            self.n_free -= 1
        else:
            slot = PyList_GET_SIZE(self.values)
            # Every slot may become free, and then there must be room to note it.
            if slot >= self.cap_free:
                self.grow_free(slot + slot // 2 + 16)
            self.values.append(value)
        return slot

    cdef int grow_free(self, Py_ssize_t cap) except -1:
        cdef Py_ssize_t *p = <Py_ssize_t *>PyMem_Realloc(self.free, cap * sizeof(Py_ssize_t))
        if p == NULL:
            raise MemoryError
        self.free = p
        self.cap_free = cap
        return 0

    cdef object give_slot(self, Py_ssize_t slot):
        """Frees the slot; the value is returned so that the caller releases it last."""
        cdef object value = self.values[slot]
        self.values[slot] = None
        self.free[self.n_free] = slot
        self.n_free += 1
        return value

    cdef void replace(self, Node **link, Node *x) noexcept:
        """Puts `x` where link[0] was, and frees that."""
        drop_node(&self.pool, link[0])
        link[0] = x

    cdef Node *leaf(self, const char *rest, Py_ssize_t n, uint32_t slot, PyObject *value) except NULL:
        """The node behind the edge rest[0], for a key that ends after the n >= 1 bytes `rest`."""
        cdef Node *x = new_node(&self.pool, True, 0, n - 1)
        set_key(x, slot, value)
        memcpy(shared(x), rest + 1, n - 1)
        return x

    cdef int split(self, Node **link, Py_ssize_t at, const char *rest, Py_ssize_t n, uint32_t slot,
                   PyObject *value) except -1:
        """Cuts link[0]'s shared bytes at `at`. The new key ends there (n = 0), or goes on with the n bytes `rest`."""
        cdef Node *x = link[0]
        cdef Node *lower = NULL
        cdef Node *leaf = NULL
        cdef Node *upper
        try:
            lower = new_node(&self.pool, slot_of(x) != NO_KEY, x.level, x.length - at - 1)
            if n:
                leaf = self.leaf(rest, n, slot, value)
            upper = new_node(&self.pool, n == 0, 1, at)
        except MemoryError:
            if lower != NULL:
                drop_node(&self.pool, lower)
            if leaf != NULL:
                drop_node(&self.pool, leaf)
            raise
        take_over(lower, x)
        memcpy(shared(lower), shared(x) + at + 1, lower.length)
        memcpy(shared(upper), shared(x), at)
        put_child(upper, shared(x)[at], lower)
        if leaf != NULL:
            put_child(upper, rest[0], leaf)
        else:
            set_key(upper, slot, value)
        self.replace(link, upper)
        return 0

    cdef int add_leaf(self, Node **link, const char *rest, Py_ssize_t n, uint32_t slot,
                      PyObject *value) except -1:
        """A new child of link[0] for the n >= 1 bytes `rest`."""
        cdef Node *x = link[0]
        cdef Node *leaf = self.leaf(rest, n, slot, value)
        if x.n == cap_of(x.level):
            try:
                self.replace(link, resized(&self.pool, x, slot_of(x) != NO_KEY, x.level + 1))
            except MemoryError:
                drop_node(&self.pool, leaf)
                raise
        put_child(link[0], rest[0], leaf)
        return 0

    cdef int mark(self, Node **link, uint32_t slot, PyObject *value) except -1:
        """The path to link[0] becomes a key."""
        if not link[0].room:
            self.replace(link, resized(&self.pool, link[0], True, link[0].level))
        set_key(link[0], slot, value)
        return 0

    @cython.critical_section
    def insert(self, bytes key not None, value):
        return self.put(key, value)

    @cython.critical_section
    def __setitem__(self, bytes key not None, value):
        self.put(key, value)

    cdef bint put(self, bytes key, object value) except -1:
        """True if the key is new."""
        cdef const char *p = PyBytes_AS_STRING(key)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(key), i = 0, k, slot
        cdef Node **link = &self.root
        cdef Node **down
        cdef Node *x
        if n > MAX_KEY:
            raise OverflowError(f"key: expected at most {MAX_KEY} bytes, got {n}")
        self.alive()
        while True:
            x = link[0]
            k = 0
            if x.length:
                k = common(shared(x), p + i, min(<Py_ssize_t>x.length, n - i))
            i += k
            if k < x.length:
                break
            if i == n:
                if slot_of(x) != NO_KEY:
                    set_key(x, slot_of(x), <PyObject *>value)
                    self.values[slot_of(x)] = value
                    return False
                break
            down = child_at(x, p[i])
            if down == NULL:
                break
            link = down
            fetch(link[0])
            i += 1
        slot = self.take_slot(value)
        try:
            if k < x.length:
                self.split(link, k, p + i, n - i, slot, <PyObject *>value)
            elif i == n:
                self.mark(link, slot, <PyObject *>value)
            else:
                self.add_leaf(link, p + i, n - i, slot, <PyObject *>value)
        except MemoryError:
            self.give_slot(slot)
            raise
        self.high = <size_t><PyObject *>value & ~<size_t>0xFFFFFFFFF
        self.count += 1
        self.version += 1
        return True

    cdef object take(self, bytes key):
        """Removes the key and returns its value; raises KeyError."""
        cdef const char *p = PyBytes_AS_STRING(key)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(key), i = 0
        cdef uint32_t slot
        cdef Node **link = &self.root
        cdef Node **above = NULL
        cdef Node **down
        cdef Node *x
        cdef Node *merged = NULL
        cdef Node *parent
        cdef int at
        self.alive()
        while True:
            x = link[0]
            if n - i < x.length or memcmp(shared(x), p + i, x.length) != 0:
                raise KeyError(key)
            i += x.length
            if i == n:
                break
            down = child_at(x, p[i])
            if down == NULL:
                raise KeyError(key)
            above = link
            link = down
            i += 1
        slot = slot_of(x)
        if slot == NO_KEY:
            raise KeyError(key)
        if above == NULL or x.n > 1:
            set_key(x, NO_KEY, NULL)
        elif x.n == 1:
            merged = self.merge(x, 0)
            drop_node(&self.pool, children(x)[0])
            self.replace(link, merged)
        else:
            parent = above[0]
            at = <int>(link - children(parent))
            if above != &self.root and slot_of(parent) == NO_KEY and parent.n == 2:
                merged = self.merge(parent, 1 - at)
                drop_node(&self.pool, children(parent)[1 - at])
            drop_node(&self.pool, x)
            if merged != NULL:
                self.replace(above, merged)
            else:
                parent.n -= 1
                memmove(children(parent) + at, children(parent) + at + 1, (parent.n - at) * sizeof(Node *))
                if hinted(parent.level):
                    memmove(hints(parent) + at, hints(parent) + at + 1, (parent.n - at) * sizeof(uint32_t))
                memmove(edges(parent) + at, edges(parent) + at + 1, parent.n - at)
                if parent.level > 2 and parent.n <= cap_of(parent.level) // 4:
                    self.shrink(above)
        self.count -= 1
        self.version += 1
        return self.give_slot(slot)

    cdef Node *merge(self, Node *x, int i) except NULL:
        """Child `i` of `x` with the bytes of both; neither is changed."""
        cdef Node *c = children(x)[i]
        cdef Node *y = new_node(&self.pool, slot_of(c) != NO_KEY, c.level, <Py_ssize_t>x.length + 1 + c.length)
        take_over(y, c)
        memcpy(shared(y), shared(x), x.length)
        shared(y)[x.length] = edges(x)[i]
        memcpy(shared(y) + x.length + 1, shared(c), c.length)
        return y

    cdef void shrink(self, Node **link) noexcept:
        # Room to spare is no error, so a failed allocation is none either.
        try:
            self.replace(link, resized(&self.pool, link[0], slot_of(link[0]) != NO_KEY, link[0].level - 1))
        except MemoryError:
            pass

    @cython.critical_section
    def remove(self, bytes key not None):
        try:
            self.take(key)
        except KeyError:
            return False
        return True

    @cython.critical_section
    def __delitem__(self, bytes key not None):
        self.take(key)

    @cython.critical_section
    def clear(self):
        cdef Pool old = self.pool
        cdef list values = self.values
        cdef list none = []
        memset(&self.pool, 0, sizeof(Pool))
        try:
            self.root = new_node(&self.pool, False, 0, 0)
        except MemoryError:
            self.pool = old
            raise
        self.values = none
        self.n_free = 0
        self.count = 0
        self.version += 1
        release(&old)
        del values

    # ---- walks --------------------------------------------------------------------------------------------------

    def __iter__(self):
        return Walk.__new__(Walk, self, b"", False)

    def items(self, bytes prefix not None=b""):
        return Walk.__new__(Walk, self, prefix, True)

    @cython.critical_section
    def check(self):
        cdef Walk walk = Walk.__new__(Walk, self, b"", False)
        cdef Frame *f
        cdef Node *x
        cdef int i
        cdef Py_ssize_t keys = 0, size = 0
        cdef set slots = set()
        assert self.root != NULL and self.root.length == 0, "the root shares no bytes"
        while walk.depth:
            f = walk.stack + walk.depth - 1
            x = f.node
            if f.next == -1:
                size += block_of(x)
                assert x.n <= cap_of(x.level) <= 256, "children fit"
                assert x == self.root or slot_of(x) != NO_KEY or x.n > 1, "a node has a key or branches"
                for i in range(1, x.n):
                    assert edges(x)[i - 1] < edges(x)[i], "edges ascend"
                if slot_of(x) != NO_KEY:
                    assert value_of(x) == PyList_GET_ITEM(self.values, slot_of(x)), "a value is its slot's"
                    keys += 1
                    slots.add(slot_of(x))
                f.next = 0
            if f.next < x.n:
                f.next += 1
                walk.push(children(x)[f.next - 1], 0)
            else:
                walk.depth -= 1
        assert keys == self.count == len(slots), "every key is counted and has its own slot"
        for i in range(self.n_free):
            assert self.free[i] not in slots, "a free slot belongs to no key"
        assert keys + self.n_free == len(self.values) <= self.cap_free, "every slot is used or free"
        assert size == self.pool.used, "memory is counted"


@cython.final
cdef class Walk:
    """Keys, or (key, value), below a prefix in byte order. The stack holds the path; a frame's next -1: not visited."""

    cdef Rax tree
    cdef unsigned long long version
    cdef bint pairs
    cdef Frame *stack
    cdef Py_ssize_t depth, cap
    cdef char *key
    cdef Py_ssize_t key_cap

    def __cinit__(self, Rax tree not None, bytes prefix not None, bint pairs):
        cdef const char *p = PyBytes_AS_STRING(prefix)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(prefix), i = 0, k
        cdef Node *x = tree.root
        cdef Node **link
        self.tree = tree
        self.version = tree.version
        self.pairs = pairs
        while True:
            k = min(<Py_ssize_t>x.length, n - i)
            if memcmp(shared(x), p + i, k) != 0:
                return
            if n - i <= x.length:
                break
            i += x.length
            link = child_at(x, p[i])
            if link == NULL:
                return
            x = link[0]
            i += 1
        self.reserve(i)
        memcpy(self.key, p, i)
        self.push(x, i)

    def __dealloc__(self):
        PyMem_Free(self.stack)
        PyMem_Free(self.key)

    cdef int reserve(self, Py_ssize_t n) except -1:
        cdef char *p
        if n > self.key_cap or self.key == NULL:
            p = <char *>PyMem_Realloc(self.key, n + n // 2 + 64)
            if p == NULL:
                raise MemoryError
            self.key = p
            self.key_cap = n + n // 2 + 64
        return 0

    cdef int push(self, Node *x, Py_ssize_t at) except -1:
        """Enters `x`, whose shared bytes begin at `at` of the key."""
        cdef Frame *f
        if self.depth == self.cap:
            f = <Frame *>PyMem_Realloc(self.stack, (2 * self.cap + 16) * sizeof(Frame))
            if f == NULL:
                raise MemoryError
            self.stack = f
            self.cap = 2 * self.cap + 16
        self.reserve(at + x.length + 1)
        memcpy(self.key + at, shared(x), x.length)
        f = self.stack + self.depth
        f.node = x
        f.next = -1
        f.key_length = at + x.length
        self.depth += 1
        return 0

    def __iter__(self):
        return self

    def __next__(self):
        with cython.critical_section(self, self.tree):
            return self.step()

    cdef object step(self):
        cdef Frame *f
        cdef Node *x
        cdef bytes key
        if self.version != self.tree.version:
            raise RuntimeError("the tree changed during iteration")
        while self.depth:
            f = self.stack + self.depth - 1
            x = f.node
            if f.next == -1:
                f.next = 0
                if slot_of(x) != NO_KEY:
                    key = PyBytes_FromStringAndSize(self.key, f.key_length)
                    return (key, self.tree.value_at(x)) if self.pairs else key
            if f.next < x.n:
                self.key[f.key_length] = edges(x)[f.next]
                f.next += 1
                self.push(children(x)[f.next - 1], f.key_length + 1)
            else:
                self.depth -= 1
        raise StopIteration

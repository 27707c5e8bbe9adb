# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compressed radix tree: an ordered map from bytes to objects that answers prefix questions.

With the keys "call_1a", "call_1b", "call_2", "cat" (`*` marks a key's end):

    root --c--> "a" --l--> "l_" --1--> "" --a--> "" *
                 |            |         +---b--> "" *
                 |            +-----2--> "" *
                 +---t--> "" *

A node holds the bytes that all keys below it share after its edge. Inserting "cart" splits nothing: it adds the edge
"r". Inserting "ca" marks the node "a". Inserting "cold" splits that node: "" with the edges "a" and "o".

    node:  | value | slot, length, n, cap | edge bytes [cap, padded] | child pointers [cap] | shared bytes [length] |

The edges stand beside the counts, so that a node of up to 44 children is searched in one cache line.

Invariants:

* Edge bytes of a node are strictly ascending, so that a walk in edge order gives keys in byte order.
* Every node but the root has a key or at least two children. Hence there are fewer than two nodes per key, and no
  path is longer than the number of keys or the longest key.
* The root shares no bytes and always exists.
* A key's value is `values[slot]`: values belong to an ordinary list, which the garbage collector knows. A slot is
  either of one node or in `free`. The node's `value` is the same pointer, borrowed: it saves a cache miss, and holds
  as long as the list has not been emptied by the collector.
* A failed allocation changes nothing: everything is allocated before the first pointer is moved.
* An old value is released after the tree is whole again, because its finalizer may use the tree.

No operation recurses, so that a path of a million nodes is no danger to the stack. Each method holds the tree's lock
where Python runs without the GIL; `version` tells an iterator that the tree has changed.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.string cimport memchr, memcmp, memcpy, memmove

cdef enum:
    HEADER = 20
    LINEAR = 8


# Lengths and slots are 32 bits wide; `put` checks both.
cdef Py_ssize_t MAX_KEY = 0xFFFFFFFF
cdef unsigned int NO_KEY = 0xFFFFFFFF

cdef struct Node:
    PyObject *value
    unsigned int slot
    unsigned int length
    unsigned short n
    unsigned short cap

cdef struct Frame:
    Node *node
    int next
    Py_ssize_t key_length


cdef inline unsigned char *edges(Node *x) noexcept nogil:
    return <unsigned char *>x + HEADER


cdef inline Py_ssize_t size_of(int cap, Py_ssize_t length) noexcept nogil:
    return (((HEADER + cap + 7) & ~7) + cap * <Py_ssize_t>sizeof(Node *) if cap else HEADER) + length


cdef inline Node **children(Node *x) noexcept nogil:
    return <Node **>(<char *>x + ((HEADER + x.cap + 7) & ~7))


cdef inline char *shared(Node *x) noexcept nogil:
    return <char *>x + size_of(x.cap, 0)


cdef inline Node **child_at(Node *x, unsigned char edge) noexcept nogil:
    """The link that `edge` stands for, or NULL."""
    cdef unsigned char *e = edges(x)
    cdef unsigned char *q
    cdef int i
    if x.n <= LINEAR:
        for i in range(x.n):
            if e[i] == edge:
                return children(x) + i
        return NULL
    q = <unsigned char *>memchr(e, edge, x.n)
    return children(x) + (q - e) if q != NULL else NULL


cdef inline Py_ssize_t common(const char *a, const char *b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i = 0
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef Node *new_node(unsigned int slot, PyObject *value, int cap, const char *bytes_, Py_ssize_t length) except NULL:
    cdef Node *x = <Node *>PyMem_Malloc(size_of(cap, length))
    if x == NULL:
        raise MemoryError
    x.value = value
    x.slot = slot
    x.length = <unsigned int>length
    x.n = 0
    x.cap = cap
    memcpy(shared(x), bytes_, length)
    return x


cdef Node *with_cap(Node *x, int cap) except NULL:
    """A copy of `x` with room for `cap` children."""
    cdef Node *y = new_node(x.slot, x.value, cap, shared(x), x.length)
    y.n = x.n
    memcpy(children(y), children(x), x.n * sizeof(Node *))
    memcpy(edges(y), edges(x), x.n)
    return y


cdef void put_child(Node *x, unsigned char edge, Node *child) noexcept nogil:
    """Adds a child where there is room, keeping the edges in order."""
    cdef unsigned char *e = edges(x)
    cdef Node **c = children(x)
    cdef int i = x.n
    while i > 0 and e[i - 1] > edge:
        e[i] = e[i - 1]
        c[i] = c[i - 1]
        i -= 1
    e[i] = edge
    c[i] = child
    x.n += 1


@cython.final
@cython.no_gc_clear
cdef class Rax:
    cdef Node *root
    cdef list values
    cdef Py_ssize_t *free
    cdef Py_ssize_t n_free, cap_free
    cdef Py_ssize_t count, node_bytes
    cdef unsigned long long version

    def __cinit__(self):
        self.values = []
        self.root = new_node(NO_KEY, NULL, 0, b"", 0)
        self.node_bytes = size_of(0, 0)

    def __init__(self):
        pass

    def __dealloc__(self):
        free_nodes(self.root)
        PyMem_Free(self.free)

    @classmethod
    def __class_getitem__(cls, item):
        return cls

    # ---- look-up ------------------------------------------------------------------------------------------------

    cdef Node *node_of(self, const char *key, Py_ssize_t n) noexcept:
        """The node at which `key` ends as a key, or NULL."""
        cdef Node *x = self.root
        cdef Node **link
        cdef Py_ssize_t i = 0
        while True:
            if x.length:
                if n - i < x.length or memcmp(shared(x), key + i, x.length) != 0:
                    return NULL
                i += x.length
            if i == n:
                return x if x.slot != NO_KEY else NULL
            link = child_at(x, key[i])
            if link == NULL:
                return NULL
            x = link[0]
            i += 1

    cdef object value_of(self, Node *x):
        if x.slot >= PyList_GET_SIZE(self.values):
            self.alive()
        return <object>x.value

    @cython.critical_section
    def find(self, bytes key not None, default=None):
        cdef Node *x = self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        return self.value_of(x) if x != NULL else default

    @cython.critical_section
    def __getitem__(self, bytes key not None):
        cdef Node *x = self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        if x == NULL:
            raise KeyError(key)
        return self.value_of(x)

    @cython.critical_section
    def __contains__(self, bytes key not None):
        return self.node_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) != NULL

    def __len__(self):
        return self.count

    @property
    def memory(self):
        return self.node_bytes

    @cython.critical_section
    def longest_prefix(self, bytes query not None, Py_ssize_t start=0):
        cdef const char *p = PyBytes_AS_STRING(query)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(query), i, best_at = 0
        cdef Node *x = self.root
        cdef Node *best = NULL
        cdef Node **link
        if not 0 <= start <= n:
            raise ValueError(f"start: expected 0 to {n}, got {start}")
        i = start
        while True:
            if x.length:
                if n - i < x.length or memcmp(shared(x), p + i, x.length) != 0:
                    break
                i += x.length
            if x.slot != NO_KEY:
                best = x
                best_at = i
            if i == n:
                break
            link = child_at(x, p[i])
            if link == NULL:
                break
            x = link[0]
            i += 1
        if best == NULL:
            return None
        if start == 0 and best_at == n:
            return (query, self.value_of(best))
        return (PyBytes_FromStringAndSize(p + start, best_at - start), self.value_of(best))

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
        self.node_bytes += size_of(x.cap, x.length) - size_of(link[0].cap, link[0].length)
        PyMem_Free(link[0])
        link[0] = x

    cdef int split(self, Node **link, Py_ssize_t at, const char *rest, Py_ssize_t n, unsigned int slot,
                   PyObject *value) except -1:
        """Cuts link[0]'s shared bytes at `at`. The new key ends there (n = 0), or goes on with the n bytes `rest`."""
        cdef Node *x = link[0]
        cdef Node *lower = NULL
        cdef Node *leaf = NULL
        cdef Node *upper
        try:
            lower = new_node(x.slot, x.value, x.cap, shared(x) + at + 1, x.length - at - 1)
            if n:
                leaf = new_node(slot, value, 0, rest + 1, n - 1)
            upper = new_node(NO_KEY if n else slot, NULL if n else value, 2, shared(x), at)
        except MemoryError:
            PyMem_Free(lower)
            PyMem_Free(leaf)
            raise
        lower.n = x.n
        memcpy(children(lower), children(x), x.n * sizeof(Node *))
        memcpy(edges(lower), edges(x), x.n)
        put_child(upper, shared(x)[at], lower)
        self.node_bytes += size_of(lower.cap, lower.length)
        if leaf != NULL:
            put_child(upper, rest[0], leaf)
            self.node_bytes += size_of(0, leaf.length)
        self.replace(link, upper)
        return 0

    cdef int add_leaf(self, Node **link, const char *rest, Py_ssize_t n, unsigned int slot,
                      PyObject *value) except -1:
        """A new child of link[0] for the n >= 1 bytes `rest`."""
        cdef Node *x = link[0]
        cdef Node *leaf = new_node(slot, value, 0, rest + 1, n - 1)
        if x.n == x.cap:
            try:
                self.replace(link, with_cap(x, max(2, 2 * x.cap)))
            except MemoryError:
                PyMem_Free(leaf)
                raise
        put_child(link[0], rest[0], leaf)
        self.node_bytes += size_of(0, leaf.length)
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
                if x.slot != NO_KEY:
                    x.value = <PyObject *>value
                    self.values[x.slot] = value
                    return False
                break
            down = child_at(x, p[i])
            if down == NULL:
                break
            link = down
            i += 1
        slot = self.take_slot(value)
        try:
            if k < x.length:
                self.split(link, k, p + i, n - i, slot, <PyObject *>value)
            elif i == n:
                x.slot = slot
                x.value = <PyObject *>value
            else:
                self.add_leaf(link, p + i, n - i, slot, <PyObject *>value)
        except MemoryError:
            self.give_slot(slot)
            raise
        self.count += 1
        self.version += 1
        return True

    cdef object take(self, bytes key):
        """Removes the key and returns its value; raises KeyError."""
        cdef const char *p = PyBytes_AS_STRING(key)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(key), i = 0
        cdef unsigned int slot
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
        slot = x.slot
        if slot == NO_KEY:
            raise KeyError(key)
        if above == NULL or x.n > 1:
            x.slot = NO_KEY
            x.value = NULL
        elif x.n == 1:
            merged = self.merge(x, 0)
            self.node_bytes -= size_of(children(x)[0].cap, children(x)[0].length)
            PyMem_Free(children(x)[0])
            self.replace(link, merged)
        else:
            parent = above[0]
            at = <int>(link - children(parent))
            if above != &self.root and parent.slot == NO_KEY and parent.n == 2:
                merged = self.merge(parent, 1 - at)
                self.node_bytes -= size_of(children(parent)[1 - at].cap, children(parent)[1 - at].length)
                PyMem_Free(children(parent)[1 - at])
            self.node_bytes -= size_of(x.cap, x.length)
            PyMem_Free(x)
            if merged != NULL:
                self.replace(above, merged)
            else:
                parent.n -= 1
                memmove(children(parent) + at, children(parent) + at + 1, (parent.n - at) * sizeof(Node *))
                memmove(edges(parent) + at, edges(parent) + at + 1, parent.n - at)
                if parent.cap > 4 and parent.n <= parent.cap // 4:
                    self.shrink(above)
        self.count -= 1
        self.version += 1
        return self.give_slot(slot)

    cdef Node *merge(self, Node *x, int i) except NULL:
        """Child `i` of `x` with the bytes of both; neither is changed."""
        cdef Node *c = children(x)[i]
        cdef Node *y
        cdef Py_ssize_t length = <Py_ssize_t>x.length + 1 + c.length
        y = <Node *>PyMem_Malloc(size_of(c.cap, length))
        if y == NULL:
            raise MemoryError
        y.value = c.value
        y.slot = c.slot
        y.length = <unsigned int>length
        y.n = c.n
        y.cap = c.cap
        memcpy(children(y), children(c), c.n * sizeof(Node *))
        memcpy(edges(y), edges(c), c.n)
        memcpy(shared(y), shared(x), x.length)
        shared(y)[x.length] = edges(x)[i]
        memcpy(shared(y) + x.length + 1, shared(c), c.length)
        return y

    cdef void shrink(self, Node **link) noexcept:
        # Room to spare is no error, so a failed allocation is none either.
        try:
            self.replace(link, with_cap(link[0], link[0].cap // 2))
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
        cdef Node *old = self.root
        cdef list values = self.values
        self.root = new_node(NO_KEY, NULL, 0, b"", 0)
        self.values = []
        self.n_free = 0
        self.count = 0
        self.node_bytes = size_of(0, 0)
        self.version += 1
        free_nodes(old)
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
                size += size_of(x.cap, x.length)
                assert x.n <= x.cap <= 256, "children fit"
                assert x == self.root or x.slot != NO_KEY or x.n > 1, "a node has a key or branches"
                for i in range(1, x.n):
                    assert edges(x)[i - 1] < edges(x)[i], "edges ascend"
                assert x.slot != NO_KEY or x.value == NULL, "a node without a key has no value"
                if x.slot != NO_KEY:
                    assert x.value == PyList_GET_ITEM(self.values, x.slot), "a node's value is its slot's"
                    keys += 1
                    slots.add(x.slot)
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
        assert size == self.node_bytes, "memory is counted"


cdef void free_nodes(Node *x) noexcept:
    """Frees a tree without recursion or memory: the first child's link of a node leads back to its parent."""
    cdef Node *parent = NULL
    cdef Node *child
    while x != NULL:
        if x.n:
            x.n -= 1
            child = children(x)[x.n]
            if x.n == 0:
                # The last child takes over the parent: `x` itself is done.
                PyMem_Free(x)
                x = child
            else:
                # Descend; remember the way back in the slot that was just taken.
                children(x)[x.n] = parent
                parent = x
                x = child
        else:
            PyMem_Free(x)
            x = parent
            if x != NULL:
                parent = children(x)[x.n]


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
                if x.slot != NO_KEY:
                    key = PyBytes_FromStringAndSize(self.key, f.key_length)
                    return (key, self.tree.value_of(x)) if self.pairs else key
            if f.next < x.n:
                self.key[f.key_length] = edges(x)[f.next]
                f.next += 1
                self.push(children(x)[f.next - 1], f.key_length + 1)
            else:
                self.depth -= 1
        raise StopIteration

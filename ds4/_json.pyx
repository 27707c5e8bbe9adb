# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, freethreading_compatible=True
"""Request JSON: one strict pass over the body, then views into it; canonical text and stream chunks straight to bytes.

    body   {"model":"m","messages":[{"role":"user","content":"h\\u00e9"}],"tools":[...]}
             |                        |
    tape   [ {  "model" "m" "messages" [ { "role" "user" "content" "h.." } ] "tools" [ ... ] }      native/text/json_tape.h
             ^                         ^
    Node   (tape, word)             root["messages"]

Invariants

* `parse` returns only if every byte of the body was seen and found right: RFC 8259, UTF-8 (Unicode 15, table 3-7), at
  most 256 nested containers. So no getter can meet a syntax error, and whatever is copied from the body is valid JSON.
* The tape is at most 16/3 times the body, scanning is linear, and the work for each 64 bytes of a string does not
  depend on what they are. Looking up a member of an object with more than 32 members builds an index once.
* A node keeps the tape, the tape keeps the body: never a cycle, so the collector need not look. Body and tape never
  change after `parse`. Paths are not kept but found again from the root when an error asks for one.
* Strings that come out hold no surrogates.

Free-threaded Python: nodes and their tape are immutable; the one lazily made thing, the index of a large object, is
made inside the node's critical section. So any number of threads may read one document. `use_isa` is for tests and
must not run beside other calls.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_Check
from libc.math cimport isfinite
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 maxchar)
    void* PyUnicode_DATA(object o)
    int PyUnicode_KIND(object o)
    Py_ssize_t PyUnicode_GET_LENGTH(object o)
    bint PyUnicode_IS_ASCII(object o)
    const char* PyUnicode_AsUTF8AndSize(object o, Py_ssize_t* size) except NULL
    double PyOS_string_to_double(const char* s, char** end, PyObject* overflow) except? -1.0


cdef extern from "../native/text/prefix.h" nogil:
    int64_t ds4_common_prefix(const uint8_t* a, const uint8_t* b, int64_t n)


cdef extern from "../native/text/utf8.h" nogil:
    uint32_t ds4_char_next(int width, const void* data, int64_t* at, int64_t n)


cdef extern from "../native/text/json.h" nogil:
    enum:
        DS4_JSON_MAX_DEPTH
        DS4_ESCAPED
        DS4_FLOAT
        DS4_JSON_N_ISA
        DS4_JSON_SIZE
        DS4_JSON_MEMORY
        DS4_SLACK
    int64_t DS4_JSON_MAX_BYTES

    ctypedef struct ds4_json_frame:
        uint32_t word
        uint32_t count
        uint32_t name
        int is_object

    ctypedef struct ds4_json_tape:
        const uint8_t* body
        int64_t size
        uint64_t* words
        int64_t n
        int64_t capacity
        int large_numbers
        int64_t steps
        int error
        int64_t error_at
        int64_t at
        int depth
        ds4_json_frame* frames

    ctypedef struct ds4_json_kernels:
        const char* name
        int (*scan)(ds4_json_tape*) noexcept nogil
        void (*decode1)(const uint8_t*, const uint8_t*, int, uint8_t*, int64_t) noexcept nogil
        void (*decode2)(const uint8_t*, const uint8_t*, int, uint16_t*, int64_t) noexcept nogil
        void (*decode4)(const uint8_t*, const uint8_t*, int, uint32_t*, int64_t) noexcept nogil
        int64_t (*extent)(const uint8_t*, const uint8_t*, unsigned*) noexcept nogil
        int64_t (*escaped_size)(const uint8_t*, int64_t) noexcept nogil

    const ds4_json_kernels* ds4_json_all
    bint ds4_json_supported(int index)
    const char* ds4_json_message(int error)
    int64_t ds4_tape_start(const uint64_t* w)
    int64_t ds4_tape_second(const uint64_t* w)
    unsigned ds4_tape_flags(const uint64_t* w)
    bint ds4_json_may_be_infinite(unsigned flags, int64_t length)
    int64_t ds4_tape_next(const uint8_t* body, const uint64_t* words, int64_t at)
    int64_t ds4_tape_end(const uint8_t* body, const uint64_t* words, int64_t at)
    uint8_t* ds4_put_escaped(uint8_t* out, uint32_t c, int all)
    bint ds4_json_resume(const ds4_json_tape* old, int64_t same, ds4_json_tape* t)
    uint8_t* ds4_json_print(const ds4_json_tape* t, int64_t at, int canonical, uint8_t* out)


MAX_DEPTH = DS4_JSON_MAX_DEPTH

cdef enum:
    LONG_WORK = 32768   # bytes from which the GIL is given up: about 5 us of scanning
    BRIEF = 64          # characters of a delta that are escaped on the stack first
    INDEX_FROM = 32     # members from which an object gets an index

cdef const ds4_json_kernels* kernels = NULL


def use_isa(str name):
    global kernels
    cdef int i
    cdef object before = None if kernels == NULL else kernels.name.decode()
    cdef const ds4_json_kernels* found = NULL
    for i in range(DS4_JSON_N_ISA):
        if ds4_json_supported(i) and (name == "auto" or ds4_json_all[i].name == name.encode()):
            found = &ds4_json_all[i]
    if found == NULL:
        raise ValueError(f"instruction set {name!r} is not one that this CPU has")
    kernels = found
    return before


use_isa("auto")


class JSONError(ValueError):
    def __init__(self, message, path="$", offset=0, syntax=False):
        self.message = message
        self.path = path
        self.offset = offset
        self.syntax = syntax
        place = "" if path == "$" else f" (`{path}`)"
        super().__init__(
            f"JSON is malformed: {message}, at byte {offset}{place}" if syntax else f"{message} - at `{path}`"
        )

    def __reduce__(self):
        return JSONError, (self.message, self.path, self.offset, self.syntax)

    @property
    def param(self):
        if self.path == "$":
            return None
        return self.path[2:] if self.path.startswith("$.") else self.path[1:]


# ---- the tape and what is read from it -------------------------------------------------------------------------


@cython.final
@cython.internal
cdef class Tape:
    cdef bytes body
    cdef ds4_json_tape t
    # Of bodies that are remembered (`Bodies`): what was made of values, by who made it and their first word; and the
    # same of the body that this one begins like, in its first `same` bytes.
    cdef dict made
    cdef dict before
    cdef int64_t same

    def __dealloc__(self):
        free(self.t.words)


cdef object step_of(object key):
    """One step of a path: `.name`, `["odd name"]` or `[3]`."""
    if isinstance(key, int):
        return f"[{key}]"
    if len(key) > 64:
        key = key[:64] + "…"
    if key.isascii() and key.isidentifier():
        return "." + key
    return '["' + escape(key).decode() + '"]'


cdef str join_path(list steps):
    """`$` and the steps; of more than 32 only both ends, so that no message grows with the nesting."""
    if len(steps) > 32:
        steps = [*steps[:16], "…", *steps[len(steps) - 16:]]
    return "$" + "".join(steps)


cdef object error_path(Tape tape):
    """Path to where the scanner stopped, from the containers that were open."""
    cdef int i
    cdef ds4_json_frame* f
    parts = []
    for i in range(tape.t.depth):
        f = &tape.t.frames[i]
        if not f.is_object:
            parts.append(f"[{f.count}]")
        elif f.name:
            parts.append(step_of(string_at(tape, f.name)))
    return join_path(parts)


cdef str path_of(Tape tape, int64_t word):
    """Path of the value at `word`, by a walk from the root."""
    cdef const uint8_t* body = tape.t.body
    cdef const uint64_t* words = tape.t.words
    cdef int64_t at = 0, name = 0, after
    cdef Py_ssize_t i
    cdef bint is_object
    steps = []
    while at != word:
        is_object = body[ds4_tape_start(words + at)] == c"{"
        at += 2
        i = 0
        while True:
            name = at
            if is_object:
                at = ds4_tape_next(body, words, at)
            after = ds4_tape_next(body, words, at)
            if after > word:
                break
            at = after
            i += 1
        steps.append(step_of(string_at(tape, name) if is_object else i))
    return join_path(steps)


cdef Tape scan(object data, Tape like=None, int64_t same=0):
    """Scans a body, of which the first `same` bytes are those of `like`; raises JSONError."""
    cdef Tape tape = Tape.__new__(Tape)
    if type(data) is bytes:
        tape.body = data
    elif isinstance(data, str):
        tape.body = utf8(data)
    else:
        with memoryview(data) as view:
            tape.body = view.tobytes()
    cdef Py_ssize_t size = PyBytes_GET_SIZE(tape.body)
    cdef ds4_json_frame frames[DS4_JSON_MAX_DEPTH]
    if size > DS4_JSON_MAX_BYTES:
        raise JSONError(ds4_json_message(DS4_JSON_SIZE).decode(), "$", DS4_JSON_MAX_BYTES, True)
    tape.t.body = <const uint8_t*>PyBytes_AS_STRING(tape.body)
    tape.t.size = size
    tape.t.frames = frames
    if like is not None:
        ds4_json_resume(&like.t, same, &tape.t)
    if size >= LONG_WORK:
        with nogil:
            kernels.scan(&tape.t)
    else:
        kernels.scan(&tape.t)
    if tape.t.error:
        if tape.t.error == DS4_JSON_MEMORY:
            raise MemoryError
        raise JSONError(ds4_json_message(tape.t.error).decode(), error_path(tape), tape.t.error_at, True)
    tape.t.frames = NULL
    return tape


cdef object string_at(Tape tape, int64_t at):
    """The string whose first word is `at`."""
    cdef const uint64_t* w = tape.t.words + at
    cdef const uint8_t* p = tape.t.body + ds4_tape_start(w) + 1
    cdef int64_t size = ds4_tape_second(w) - 2
    if size == 0:
        return ""
    if ds4_tape_flags(w) == 0:
        text = PyUnicode_New(size, 0x7F)
        memcpy(PyUnicode_DATA(text), p, size)
        return text
    return decoded(p, size, True, w[1] & 0xFFFFFFFFu, <unsigned>(w[1] >> 32))


cdef object decoded(const uint8_t* p, int64_t size, bint escapes, int64_t chars, unsigned width):
    """Valid UTF-8 of known extent as str, with the escapes of a JSON string or without."""
    cdef void* data
    text = PyUnicode_New(chars, 0x7F if width == 0 else 0xFF if width == 1 else 0xFFFF if width == 2 else 0x10FFFF)
    data = PyUnicode_DATA(text)
    if size < LONG_WORK:
        decode_into(p, size, escapes, data, chars, width)
    else:
        with nogil:
            decode_into(p, size, escapes, data, chars, width)
    return text


cdef void decode_into(
    const uint8_t* p, int64_t size, bint escapes, void* data, int64_t chars, unsigned width
) noexcept nogil:
    if width < 2:
        kernels.decode1(p, p + size, escapes, <uint8_t*>data, chars)
    elif width == 2:
        kernels.decode2(p, p + size, escapes, <uint16_t*>data, chars)
    else:
        kernels.decode4(p, p + size, escapes, <uint32_t*>data, chars)


cdef int small_int(const uint8_t* p, int64_t size, int64_t* value) noexcept nogil:
    """An integer literal of at most 18 digits; 0 if it has more."""
    cdef bint negative = p[0] == c"-"
    cdef int64_t v = 0
    cdef int64_t i
    if size - negative > 18:
        return 0
    for i in range(negative, size):
        v = v * 10 + (p[i] - c"0")
    value[0] = -v if negative else v
    return 1


cdef object int_at(Tape tape, int64_t at):
    """An integer literal as int, None if it has more digits than Python converts."""
    cdef const uint64_t* w = tape.t.words + at
    cdef const uint8_t* p = tape.t.body + ds4_tape_start(w)
    cdef int64_t value
    if small_int(p, ds4_tape_second(w), &value):
        return value
    try:
        return int(PyBytes_FromStringAndSize(<const char*>p, ds4_tape_second(w)))
    except ValueError:
        return None


cdef double float_at(Tape tape, int64_t at) except? -1.0:
    """A number as the nearest double, infinite if it is too large."""
    cdef const uint64_t* w = tape.t.words + at
    cdef const char* p = <const char*>tape.t.body + ds4_tape_start(w)
    cdef char* end
    # What follows a number in valid JSON ends it for this function too: white space, comma, bracket or the final 0.
    return PyOS_string_to_double(p, &end, NULL)


cdef object load(Tape tape, int64_t* at):
    """The value at `at` as Python objects; moves `at` behind it. Nesting is bounded by the scanner."""
    cdef const uint64_t* w = tape.t.words + at[0]
    cdef uint8_t first = tape.t.body[ds4_tape_start(w)]
    cdef int64_t word = at[0]
    cdef int64_t last
    cdef double real
    if first == c'"':
        at[0] = ds4_tape_next(tape.t.body, tape.t.words, word)
        return string_at(tape, word)
    if first == c"{":
        last = ds4_tape_second(w)
        at[0] += 2
        members = {}
        while at[0] < last:
            name = string_at(tape, at[0])
            at[0] = ds4_tape_next(tape.t.body, tape.t.words, at[0])
            members[name] = load(tape, at)
        return members
    if first == c"[":
        last = ds4_tape_second(w)
        at[0] += 2
        elements = []
        while at[0] < last:
            elements.append(load(tape, at))
        return elements
    at[0] += 1
    if first == c"t":
        return True
    if first == c"f":
        return False
    if first == c"n":
        return None
    if ds4_tape_flags(w) & DS4_FLOAT:
        real = float_at(tape, word)
        if isfinite(real):
            return real
    else:
        value = int_at(tape, word)
        if value is not None:
            return value
    raise JSONError("Number out of range", path_of(tape, word), ds4_tape_start(w))


cdef bint all_finite(Tape tape, int64_t at, int64_t last) except -1:
    """Are all numbers in these words finite as doubles?"""
    cdef const uint64_t* w
    cdef const uint8_t* p
    if not tape.t.large_numbers:
        return True
    while at < last:
        w = tape.t.words + at
        p = tape.t.body + ds4_tape_start(w)
        if p[0] == c"{" or p[0] == c"[":
            at += 2
            continue
        if p[0] == c"-" or c"0" <= p[0] <= c"9":
            if ds4_json_may_be_infinite(ds4_tape_flags(w), ds4_tape_second(w)):
                if not isfinite(float_at(tape, at)):
                    return False
        at = ds4_tape_next(tape.t.body, tape.t.words, at)
    return True


cdef object decode_valid(const uint8_t* p, int64_t size):
    """Valid UTF-8 as str."""
    cdef unsigned width
    cdef int64_t chars = kernels.extent(p, p + size, &width)
    return decoded(p, size, False, chars, width)


cdef object printed(Tape tape, int64_t at, bint canonical_form, tuple drop):
    """The value's text in one of the two forms, without the members of the object that `drop` names."""
    cdef int64_t last = ds4_tape_next(tape.t.body, tape.t.words, at)
    cdef int64_t start = ds4_tape_start(tape.t.words + at)
    cdef int64_t size = ds4_tape_end(tape.t.body, tape.t.words, at) - start
    cdef bint is_object = tape.t.body[start] == c"{"
    cdef bint first = True
    cdef int64_t word, value
    cdef uint8_t* out
    cdef uint8_t* end
    if canonical_form and not all_finite(tape, at, last):
        return decode_valid(tape.t.body + start, size)
    out = <uint8_t*>PyMem_RawMalloc(size + (last - at) + 8 + DS4_SLACK)
    if out == NULL:
        raise MemoryError
    try:
        if drop and is_object:
            end = out
            end[0] = c"{"
            end += 1
            word = at + 2
            while word < last:
                value = ds4_tape_next(tape.t.body, tape.t.words, word)
                if string_at(tape, word) not in drop:
                    if not first:
                        end[0] = c","
                        end[1] = c" "
                        end += 1 + canonical_form
                    first = False
                    end = ds4_json_print(&tape.t, word, canonical_form, end)
                    end[0] = c":"
                    end[1] = c" "
                    end += 1 + canonical_form
                    end = ds4_json_print(&tape.t, value, canonical_form, end)
                word = ds4_tape_next(tape.t.body, tape.t.words, value)
            end[0] = c"}"
            end += 1
        elif size >= LONG_WORK:
            with nogil:
                end = ds4_json_print(&tape.t, at, canonical_form, out)
        else:
            end = ds4_json_print(&tape.t, at, canonical_form, out)
        return decode_valid(out, end - out)
    finally:
        PyMem_RawFree(out)


# ---- nodes -----------------------------------------------------------------------------------------------------


cdef object kind_of(Tape tape, int64_t at):
    cdef const uint64_t* w = tape.t.words + at
    cdef uint8_t first = tape.t.body[ds4_tape_start(w)]
    if first == c'"':
        return "str"
    if first == c"{":
        return "object"
    if first == c"[":
        return "array"
    if first == c"t" or first == c"f":
        return "bool"
    if first == c"n":
        return "null"
    return "float" if ds4_tape_flags(w) & DS4_FLOAT else "int"


cdef Node make_node(Tape tape, int64_t at):
    cdef Node node = Node.__new__(Node)
    node.tape = tape
    node.at = at
    return node


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Node:
    cdef Tape tape
    cdef dict index     # member name -> word of its last value; only for large objects
    cdef int64_t at

    def __init__(self):
        raise TypeError("nodes are made by parse()")

    def __repr__(self):
        return f"<Node {kind_of(self.tape, self.at)} at {self.path}>"

    # -- place

    @property
    def kind(self):
        return kind_of(self.tape, self.at)

    @property
    def is_null(self):
        return self.first() == c"n"

    @property
    def path(self):
        return path_of(self.tape, self.at)

    @property
    def start(self):
        return ds4_tape_start(self.tape.t.words + self.at)

    @property
    def end(self):
        return ds4_tape_end(self.tape.t.body, self.tape.t.words, self.at)

    @property
    def raw(self):
        cdef int64_t start = ds4_tape_start(self.tape.t.words + self.at)
        cdef int64_t end = ds4_tape_end(self.tape.t.body, self.tape.t.words, self.at)
        return PyBytes_FromStringAndSize(<const char*>self.tape.t.body + start, end - start)

    @property
    def steps(self):
        return self.tape.t.steps

    cdef inline uint8_t first(self) noexcept:
        return self.tape.t.body[ds4_tape_start(self.tape.t.words + self.at)]

    cdef object mismatch(self, str expected):
        return JSONError(f"Expected `{expected}`, got `{kind_of(self.tape, self.at)}`", self.path, self.start)

    def error(self, str message not None):
        return JSONError(message, self.path, self.start)

    # -- objects and arrays

    cdef int64_t find(self, str name) except -2:
        """Word of the member's value, the last one of that name; -1 if there is none."""
        cdef const uint8_t* body = self.tape.t.body
        cdef const uint64_t* words = self.tape.t.words
        cdef int64_t at = self.at + 2
        cdef int64_t last
        cdef int64_t found = -1
        cdef Py_ssize_t size
        cdef const char* wanted
        if self.first() != c"{":
            raise self.mismatch("object")
        if ds4_tape_second(words + self.at + 1) > INDEX_FROM:
            return self.members().get(name, -1)
        try:
            wanted = PyUnicode_AsUTF8AndSize(name, &size)
        except UnicodeEncodeError:
            return -1
        last = ds4_tape_second(words + self.at)
        while at < last:
            if ds4_tape_flags(words + at) & DS4_ESCAPED:
                hit = string_at(self.tape, at) == name
                at += 2
            else:
                hit = ds4_tape_second(words + at) == size + 2 and not memcmp(
                    body + ds4_tape_start(words + at) + 1, wanted, size
                )
                at = ds4_tape_next(body, words, at)
            if hit:
                found = at
            at = ds4_tape_next(body, words, at)
        return found

    cdef dict members(self):
        """Names to the words of their last values. Raises JSONError if this is no object."""
        cdef int64_t at = self.at + 2
        cdef int64_t last
        cdef dict index
        if self.first() != c"{":
            raise self.mismatch("object")
        with cython.critical_section(self):
            if self.index is not None:
                return self.index
            index = {}
            last = ds4_tape_second(self.tape.t.words + self.at)
            while at < last:
                name = string_at(self.tape, at)
                at = ds4_tape_next(self.tape.t.body, self.tape.t.words, at)
                index[name] = at
                at = ds4_tape_next(self.tape.t.body, self.tape.t.words, at)
            if len(index) > INDEX_FROM:
                self.index = index
            return index

    cdef Node present(self, str name):
        """The member, None if it is absent or null."""
        cdef int64_t at = self.find(name)
        if at < 0 or self.tape.t.body[ds4_tape_start(self.tape.t.words + at)] == c"n":
            return None
        return make_node(self.tape, at)

    def __len__(self):
        cdef uint8_t first = self.first()
        if first != c"{" and first != c"[":
            raise self.mismatch("array")
        return ds4_tape_second(self.tape.t.words + self.at + 1)

    def __bool__(self):
        return True

    def __contains__(self, name):
        return self.first() == c"{" and PyUnicode_Check(name) and self.find(name) >= 0

    def __getitem__(self, key):
        cdef int64_t at
        cdef Py_ssize_t i, n
        if PyUnicode_Check(key):
            at = self.find(key)
            if at < 0:
                raise JSONError(f"Object missing required field `{key}`", self.path, self.start)
            return make_node(self.tape, at)
        i = key
        if self.first() != c"[":
            raise self.mismatch("array")
        n = ds4_tape_second(self.tape.t.words + self.at + 1)
        if i < 0:
            i += n
        if not 0 <= i < n:
            raise IndexError(f"element {key} of an array of {n}")
        at = self.at + 2
        while i > 0:
            at = ds4_tape_next(self.tape.t.body, self.tape.t.words, at)
            i -= 1
        return make_node(self.tape, at)

    def get(self, str name not None):
        return self.present(name)

    def keys(self):
        return list(self.members())

    def items(self):
        return [(name, make_node(self.tape, at)) for name, at in self.members().items()]

    def texts(self):
        cdef int64_t at
        cdef const uint64_t* w
        cdef uint8_t first
        found = []
        for name, at in self.members().items():
            w = self.tape.t.words + at
            first = self.tape.t.body[ds4_tape_start(w)]
            if first == c'"':
                text = string_at(self.tape, at)
            elif first == c"{" or first == c"[":
                text = printed(self.tape, at, False, ())
            else:
                text = decode_valid(self.tape.t.body + ds4_tape_start(w), ds4_tape_second(w))
            found.append((name, kind_of(self.tape, at), text))
        return found

    def __iter__(self):
        cdef int64_t at = self.at + 2
        cdef int64_t last
        if self.first() != c"[":
            raise self.mismatch("array")
        last = ds4_tape_second(self.tape.t.words + self.at)
        nodes = []
        while at < last:
            nodes.append(make_node(self.tape, at))
            at = ds4_tape_next(self.tape.t.body, self.tape.t.words, at)
        return iter(nodes)

    def get_object(self, str name not None):
        cdef Node node = self.present(name)
        return None if node is None else node.as_object()

    def get_array(self, str name not None):
        cdef Node node = self.present(name)
        return None if node is None else node.as_array()

    def get_str(self, str name not None, default=None):
        cdef int64_t at = self.find(name)
        cdef uint8_t first
        if at < 0:
            return default
        first = self.tape.t.body[ds4_tape_start(self.tape.t.words + at)]
        if first == c'"':
            return string_at(self.tape, at)
        if first == c"n":
            return default
        raise make_node(self.tape, at).mismatch("str")

    def get_bool(self, str name not None, default=None):
        cdef Node node = self.present(name)
        return default if node is None else node.as_bool()

    def get_int(self, str name not None, default=None, lo=None, hi=None):
        cdef Node node = self.present(name)
        return default if node is None else node.as_int(lo, hi)

    def get_float(self, str name not None, default=None, lo=None, hi=None):
        cdef Node node = self.present(name)
        return default if node is None else node.as_float(lo, hi)

    def ints(self, lo=None, hi=None):
        cdef int64_t at = self.at + 2
        cdef int64_t last, value
        cdef const uint64_t* w
        cdef int64_t low = INT64_MIN if lo is None else lo
        cdef int64_t high = INT64_MAX if hi is None else hi
        if self.first() != c"[":
            raise self.mismatch("array")
        last = ds4_tape_second(self.tape.t.words + self.at)
        result = []
        while at < last:
            w = self.tape.t.words + at
            if (
                is_number(self.tape.t.body[ds4_tape_start(w)])
                and not ds4_tape_flags(w) & DS4_FLOAT
                and small_int(self.tape.t.body + ds4_tape_start(w), ds4_tape_second(w), &value)
                and low <= value <= high
            ):
                result.append(value)
            else:
                result.append(make_node(self.tape, at).as_int(lo, hi))
            at = ds4_tape_next(self.tape.t.body, self.tape.t.words, at)
        return result

    # -- values

    cpdef Node as_object(self):
        if self.first() != c"{":
            raise self.mismatch("object")
        return self

    cpdef Node as_array(self):
        if self.first() != c"[":
            raise self.mismatch("array")
        return self

    cpdef object as_str(self):
        if self.first() != c'"':
            raise self.mismatch("str")
        return string_at(self.tape, self.at)

    cpdef object as_bool(self):
        cdef uint8_t first = self.first()
        if first == c"t":
            return True
        if first == c"f":
            return False
        raise self.mismatch("bool")

    cpdef object as_int(self, lo=None, hi=None):
        cdef double real
        if not is_number(self.first()):
            raise self.mismatch("int")
        if ds4_tape_flags(self.tape.t.words + self.at) & DS4_FLOAT:
            real = float_at(self.tape, self.at)
            if not isfinite(real):
                raise self.error("Number out of range")
            value = int(real)
            if value != real:
                raise self.mismatch("int")
        else:
            value = int_at(self.tape, self.at)
        if value is None or not INT64_MIN <= value <= INT64_MAX:
            raise self.error("Number out of range")
        return self.bounded("int", value, lo, hi)

    cpdef object as_float(self, lo=None, hi=None):
        cdef double real
        if not is_number(self.first()):
            raise self.mismatch("float")
        real = float_at(self.tape, self.at)
        if not isfinite(real):
            raise self.error("Number out of range")
        return self.bounded("float", real, lo, hi)

    cdef object bounded(self, str kind, object value, object lo, object hi):
        if lo is not None and value < lo:
            raise self.error(f"Expected `{kind}` >= {lo}, got {value}")
        if hi is not None and value > hi:
            raise self.error(f"Expected `{kind}` <= {hi}, got {value}")
        return value

    def loads(self):
        cdef int64_t at = self.at
        return load(self.tape, &at)

    def canonical(self, drop=()):
        return printed(self.tape, self.at, True, tuple(drop))

    def minified(self):
        return printed(self.tape, self.at, False, ())


cdef inline bint is_number(uint8_t first) noexcept nogil:
    return first == c"-" or c"0" <= first <= c"9"


include "_json_fields.pxi"
include "_json_texts.pxi"
include "_json_bodies.pxi"


def parse(body):
    return make_node(scan(body), 0)


def loads(data):
    return parse(data).loads()


def canonical(data):
    return printed(scan(data), 0, True, ())


def minify(data):
    return printed(scan(data), 0, False, ())


include "_json_write.pxi"

# Known members of many objects as rows of Python values, in one walk over the tape for each object.

cdef enum:
    MAX_FIELDS = 64

FIELD_KINDS = ("any", "str", "int", "float", "bool", "object", "array")

cdef enum:
    ROW = 7     # kinds beyond FIELD_KINDS: an object by its own fields
    ROWS = 8    # an array of such objects


@cython.final
cdef class Fields:
    cdef tuple names
    cdef tuple inner                        # `Fields` of the rows inside, else None
    cdef Py_ssize_t n
    cdef const char* name[MAX_FIELDS]       # UTF-8, owned by `names`
    cdef Py_ssize_t size[MAX_FIELDS]
    cdef int kind[MAX_FIELDS]

    def __init__(self, **kinds):
        cdef Py_ssize_t i
        if not 0 < len(kinds) <= MAX_FIELDS:
            raise ValueError(f"{len(kinds)} fields, from 1 to {MAX_FIELDS} are allowed")
        if self.names is not None:
            raise TypeError("fields are fixed when they are made")
        inner = []
        for i, (name, kind) in enumerate(kinds.items()):
            self.name[i] = PyUnicode_AsUTF8AndSize(name, &self.size[i])
            if isinstance(kind, Fields):
                self.kind[i] = ROW
                inner.append(kind)
            elif isinstance(kind, list) and len(kind) == 1 and isinstance(kind[0], Fields):
                self.kind[i] = ROWS
                inner.append(kind[0])
            elif isinstance(kind, str) and kind in FIELD_KINDS:
                self.kind[i] = FIELD_KINDS.index(kind)
                inner.append(None)
            else:
                raise ValueError(f"field {name!r} has kind {kind!r}, not one of {', '.join(FIELD_KINDS)} or fields")
        self.names = tuple(kinds)
        self.inner = tuple(inner)
        self.n = len(kinds)

    cdef tuple take(self, Tape tape, int64_t at):
        """Values of the object at `at`."""
        cdef const uint8_t* body = tape.t.body
        cdef const uint64_t* words = tape.t.words
        cdef int64_t found[MAX_FIELDS]
        cdef int64_t last, word
        cdef Py_ssize_t i, likely = 0, n = self.n
        cdef int64_t length
        cdef const uint8_t* name
        cdef uint8_t first
        if body[ds4_tape_start(words + at)] != c"{":
            raise make_node(tape, at).mismatch("object")
        for i in range(n):
            found[i] = -1
        last = ds4_tape_second(words + at)
        word = at + 2
        while word < last:
            i = -1
            if ds4_tape_flags(words + word) & DS4_ESCAPED:
                text = string_at(tape, word)
                if text in self.names:
                    i = self.names.index(text)
                word += 2
            else:
                # Members mostly come in the order of the fields: the search goes on where the last one ended.
                length = ds4_tape_second(words + word) - 2
                name = body + ds4_tape_start(words + word) + 1
                for _ in range(n):
                    if self.size[likely] == length and memcmp(self.name[likely], name, length) == 0:
                        i = likely
                    likely = likely + 1 if likely + 1 < n else 0
                    if i >= 0:
                        break
                word = ds4_tape_next(body, words, word)
            if i >= 0:
                found[i] = word
            word = ds4_tape_next(body, words, word)
        values = PyTuple_New(n)
        for i in range(n):
            value = None
            if found[i] >= 0:
                first = body[ds4_tape_start(words + found[i])]
                if first == c'"' and self.kind[i] <= 1:
                    value = string_at(tape, found[i])
                elif first != c"n":
                    value = self.convert(tape, found[i], i)
            Py_INCREF(value)
            PyTuple_SET_ITEM(values, i, value)
        return values

    cdef list take_all(self, Tape tape, int64_t at):
        """Values of every element of the array at `at`."""
        cdef int64_t last
        if tape.t.body[ds4_tape_start(tape.t.words + at)] != c"[":
            raise make_node(tape, at).mismatch("array")
        last = ds4_tape_second(tape.t.words + at)
        at += 2
        rows = []
        while at < last:
            rows.append(self.take(tape, at))
            at = ds4_tape_next(tape.t.body, tape.t.words, at)
        return rows

    cdef object convert(self, Tape tape, int64_t at, Py_ssize_t i):
        cdef int kind = self.kind[i]
        cdef Node node
        if kind == ROW:
            return (<Fields>self.inner[i]).take(tape, at)
        if kind == ROWS:
            return (<Fields>self.inner[i]).take_all(tape, at)
        node = make_node(tape, at)
        if kind == 0:
            return node if node.first() == c"{" or node.first() == c"[" else node.loads()
        if kind == 1:
            return node.as_str()
        if kind == 2:
            return node.as_int()
        if kind == 3:
            return node.as_float()
        if kind == 4:
            return node.as_bool()
        return node.as_object() if kind == 5 else node.as_array()

    def read(self, Node node not None):
        return self.take(node.tape, node.at)

    def read_all(self, Node array not None):
        return self.take_all(array.tape, array.at)

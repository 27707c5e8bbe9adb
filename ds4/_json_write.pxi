# From Python to JSON text: escaping, stream chunks, `dumps`. A string is measured, then written once; short ones are
# escaped on the stack first, which is cheaper than to go over them twice.

cdef inline int64_t escaped_length(uint32_t c) noexcept nogil:
    if c >= 0x80:
        return 2 if c < 0x800 else 3 if c < 0x10000 else 4
    if c >= 0x20:
        return 2 if c == c'"' or c == c"\\" else 1
    return 2 if c == 9 or c == 10 or c == 13 else 6


cdef int64_t escaped_size(int kind, bint is_ascii, const void* data, int64_t n) noexcept nogil:
    cdef int64_t size = 0
    cdef int64_t i = 0
    if is_ascii:
        return kernels.escaped_size(<const uint8_t*>data, n)
    while i < n:
        size += escaped_length(ds4_char_next(kind, data, &i, n))
    return size


cdef uint8_t* put_escaped(
    uint8_t* out, int64_t size, int kind, bint is_ascii, const void* data, int64_t n
) noexcept nogil:
    """Writes the escaped form of the n characters, `size` bytes if that is known; returns the end."""
    cdef int64_t i = 0
    cdef uint8_t* end = out
    if is_ascii and size == n:
        memcpy(out, data, n)
        return out + n
    while i < n:
        end = ds4_put_escaped(end, ds4_char_next(kind, data, &i, n), 0)
    return end


cpdef bytes escape(str text):
    return sse_chunk(b"", text, b"")


cpdef bytes sse_chunk(bytes head, str delta, bytes tail):
    if head is None or delta is None or tail is None:
        raise TypeError("head and tail must be bytes, delta str")
    cdef int kind = PyUnicode_KIND(delta)
    cdef bint is_ascii = PyUnicode_IS_ASCII(delta)
    cdef const void* data = PyUnicode_DATA(delta)
    cdef Py_ssize_t n = PyUnicode_GET_LENGTH(delta)
    cdef int64_t size
    cdef uint8_t brief[6 * BRIEF]
    cdef Py_ssize_t before = PyBytes_GET_SIZE(head)
    cdef Py_ssize_t after = PyBytes_GET_SIZE(tail)
    cdef bint short_text = n <= BRIEF and not is_ascii
    if short_text:
        # Cheaper than to go over it twice.
        size = put_escaped(brief, -1, kind, False, data, n) - brief
    else:
        size = escaped_size(kind, is_ascii, data, n)
    chunk = PyBytes_FromStringAndSize(NULL, before + size + after)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(chunk)
    memcpy(out, PyBytes_AS_STRING(head), before)
    if short_text:
        memcpy(out + before, brief, size)
    else:
        put_escaped(out + before, size, kind, is_ascii, data, n)
    memcpy(out + before + size, PyBytes_AS_STRING(tail), after)
    return chunk


cdef bytes utf8(str text):
    """The text as UTF-8, surrogates repaired."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


@cython.final
@cython.internal
cdef class Writer:
    cdef uint8_t* data
    cdef int64_t size
    cdef int64_t capacity

    def __dealloc__(self):
        PyMem_RawFree(self.data)

    cdef uint8_t* room(self, int64_t more) except NULL:
        """Where `more` bytes may be written; the caller adds to size what it wrote."""
        cdef uint8_t* grown
        cdef int64_t capacity
        if self.capacity - self.size < more:
            capacity = self.capacity + self.capacity // 2 + more + 256
            grown = <uint8_t*>PyMem_RawRealloc(self.data, capacity)
            if grown == NULL:
                raise MemoryError
            self.data = grown
            self.capacity = capacity
        return self.data + self.size

    cdef int put(self, const void* p, int64_t n) except -1:
        memcpy(self.room(n), p, n)
        self.size += n
        return 0

    cdef int put_byte(self, uint8_t c) except -1:
        self.room(1)[0] = c
        self.size += 1
        return 0

    cdef int put_str(self, str text) except -1:
        cdef int kind = PyUnicode_KIND(text)
        cdef bint is_ascii = PyUnicode_IS_ASCII(text)
        cdef const void* data = PyUnicode_DATA(text)
        cdef Py_ssize_t n = PyUnicode_GET_LENGTH(text)
        cdef int64_t size = escaped_size(kind, is_ascii, data, n)
        cdef uint8_t* out = self.room(size + 2)
        out[0] = c'"'
        put_escaped(out + 1, size, kind, is_ascii, data, n)
        out[size + 1] = c'"'
        self.size += size + 2
        return 0

    cdef int put_value(self, object value, int depth) except -1:
        cdef bytes text
        cdef bint first = True
        cdef Py_ssize_t i = 0
        if isinstance(value, str):
            return self.put_str(<str>value)
        if value is None:
            return self.put(b"null", 4)
        if value is True:
            return self.put(b"true", 4)
        if value is False:
            return self.put(b"false", 5)
        if isinstance(value, int):
            text = int.__repr__(value).encode()
            return self.put(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        if isinstance(value, float):
            if not isfinite(PyFloat_AS_DOUBLE(value)):
                raise JSONError(f"Expected a finite number, got `{float.__repr__(value)}`")
            text = float.__repr__(value).encode()
            return self.put(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        if isinstance(value, Node):
            text = (<Node>value).minified().encode()
            return self.put(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        if not isinstance(value, (dict, list, tuple)):
            raise JSONError(f"Expected a JSON value, got `{type(value).__name__}`")
        if depth == DS4_JSON_MAX_DEPTH:
            raise JSONError(f"More than {DS4_JSON_MAX_DEPTH} nested containers")
        if isinstance(value, dict):
            self.put_byte(c"{")
            for name, member in value.items():
                if not isinstance(name, str):
                    raise JSONError(f"Expected `str` as a member name, got `{type(name).__name__}`")
                if not first:
                    self.put_byte(c",")
                first = False
                self.put_str(<str>name)
                self.put_byte(c":")
                try:
                    self.put_value(member, depth + 1)
                except JSONError as e:
                    raise JSONError(e.message, "$" + step_of(name) + e.path[1:]) from None
            return self.put_byte(c"}")
        self.put_byte(c"[")
        for element in value:
            if not first:
                self.put_byte(c",")
            first = False
            try:
                self.put_value(element, depth + 1)
            except JSONError as e:
                raise JSONError(e.message, "$" + step_of(i) + e.path[1:]) from None
            i += 1
        return self.put_byte(c"]")


def dumps(value):
    cdef Writer writer = Writer.__new__(Writer)
    writer.put_value(value, 0)
    return PyBytes_FromStringAndSize(<const char*>writer.data, writer.size)

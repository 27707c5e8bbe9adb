# Server-sent events (WHATWG HTML, section 9.2) as bytes, in an HTTP chunk of their own (RFC 9112 section 7.1) or plain.

cdef enum:
    CHUNK_ENDS = 20     # at most 16 digits of the size, and the two line ends around the chunk


cdef inline int64_t breaks_in(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """A bound of the line breaks in [p, end), 0 only if there are none. CR and LF together are one."""
    cdef int64_t n = 0
    cdef const uint8_t* q = p
    if memchr(p, c"\n", end - p) == NULL and memchr(p, c"\r", end - p) == NULL:
        return 0
    while q < end:
        n += q[0] == c"\n" or q[0] == c"\r"
        q += 1
    return n


cdef uint8_t* put_folded(uint8_t* out, const uint8_t* p, const uint8_t* end) noexcept nogil:
    """The bytes with each line break made the beginning of another `data:` line; returns the end."""
    while p < end:
        if p[0] != c"\n" and p[0] != c"\r":
            out[0] = p[0]
            out += 1
        else:
            memcpy(out, b"\ndata: ", 7)
            out += 7
            if p[0] == c"\r" and p + 1 < end and p[1] == c"\n":
                p += 1
        p += 1
    return out


cdef uint8_t* put_size(uint8_t* out, int64_t size) noexcept nogil:
    """The first line of a chunk of `size` bytes, size > 0; returns the end."""
    cdef int digits = 1
    cdef int i
    while size >> (4 * digits):
        digits += 1
    for i in range(digits):
        out[i] = b"0123456789abcdef"[(size >> (4 * (digits - 1 - i))) & 15]
    out[digits] = c"\r"
    out[digits + 1] = c"\n"
    return out + digits + 2


cdef bytes folded(const uint8_t* p, const uint8_t* end, int64_t breaks):
    cdef bytes room = PyBytes_FromStringAndSize(NULL, (end - p) + 6 * breaks)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(room)
    return PyBytes_FromStringAndSize(<const char*>out, put_folded(out, p, end) - out)


def frame_event(bytes head not None, bytes data not None, bint chunked=False):
    cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t before = PyBytes_GET_SIZE(head)
    cdef int64_t breaks = breaks_in(p, p + size)
    cdef uint8_t first[CHUNK_ENDS]
    cdef Py_ssize_t line = 0
    if breaks:
        data = folded(p, p + size, breaks)
        p = <const uint8_t*>PyBytes_AS_STRING(data)
        size = PyBytes_GET_SIZE(data)
    if chunked:
        line = put_size(first, before + size + 2) - first
    framed = PyBytes_FromStringAndSize(NULL, line + before + size + 2 + 2 * chunked)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(framed)
    memcpy(out, first, line)
    memcpy(out + line, PyBytes_AS_STRING(head), before)
    memcpy(out + line + before, p, size)
    memcpy(out + line + before + size, b"\n\n\r\n", 2 + 2 * chunked)
    return framed


def frame_chunk(bytes data not None):
    cdef uint8_t first[CHUNK_ENDS]
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
    if size == 0:
        raise ValueError("an empty chunk would end the body")
    cdef Py_ssize_t line = put_size(first, size) - first
    framed = PyBytes_FromStringAndSize(NULL, line + size + 2)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(framed)
    memcpy(out, first, line)
    memcpy(out + line, PyBytes_AS_STRING(data), size)
    memcpy(out + line + size, b"\r\n", 2)
    return framed

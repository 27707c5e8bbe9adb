# Bytes put together in memory that what comes after them can have again.

cdef extern from "Python.h":
    void Py_SET_SIZE(object o, Py_ssize_t size)

cdef enum:
    ROOMY_FROM = 65536


def roomy(Py_ssize_t size):
    cdef Py_ssize_t step = 4096
    while 16 * step < size:
        step *= 2
    return (size + step - 1) // step * step


def join_roomy(list parts not None):
    cdef Py_ssize_t size = 0
    cdef Py_buffer view
    cdef uint8_t* out
    for part in parts:
        size += len(part)
    if size < ROOMY_FROM:
        return b"".join(parts)
    joined = PyBytes_FromStringAndSize(NULL, roomy(size))
    out = <uint8_t*>PyBytes_AS_STRING(joined)
    for part in parts:
        PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)
        if view.len > size:
            PyBuffer_Release(&view)
            raise ValueError("a part has grown")
        memcpy(out, view.buf, view.len)
        out += view.len
        size -= view.len
        PyBuffer_Release(&view)
    # The object was made here and is nobody else's yet. Its memory is freed as a whole, whatever its size says.
    size = out - <uint8_t*>PyBytes_AS_STRING(joined)
    out[0] = 0
    Py_SET_SIZE(joined, size)
    return joined

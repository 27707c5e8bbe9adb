# What a parser gives out: small objects that compare and print.


@cython.final
@cython.freelist(64)
cdef class ReasoningDelta:
    cdef readonly str text

    def __init__(self, str text not None):
        self.text = text

    def __repr__(self):
        return f"ReasoningDelta({self.text!r})"

    def __eq__(self, other):
        return type(other) is ReasoningDelta and (<ReasoningDelta>other).text == self.text

    __hash__ = None


@cython.final
@cython.freelist(64)
cdef class ContentDelta:
    cdef readonly str text

    def __init__(self, str text not None):
        self.text = text

    def __repr__(self):
        return f"ContentDelta({self.text!r})"

    def __eq__(self, other):
        return type(other) is ContentDelta and (<ContentDelta>other).text == self.text

    __hash__ = None


@cython.final
@cython.freelist(16)
cdef class ToolCallStart:
    cdef readonly Py_ssize_t index
    cdef readonly str name

    def __init__(self, Py_ssize_t index, str name not None):
        self.index = index
        self.name = name

    def __repr__(self):
        return f"ToolCallStart({self.index}, {self.name!r})"

    def __eq__(self, other):
        return (
            type(other) is ToolCallStart
            and (<ToolCallStart>other).index == self.index
            and (<ToolCallStart>other).name == self.name
        )

    __hash__ = None


@cython.final
@cython.freelist(64)
cdef class ToolCallDelta:
    cdef readonly Py_ssize_t index
    cdef readonly str arguments

    def __init__(self, Py_ssize_t index, str arguments not None):
        self.index = index
        self.arguments = arguments

    def __repr__(self):
        return f"ToolCallDelta({self.index}, {self.arguments!r})"

    def __eq__(self, other):
        return (
            type(other) is ToolCallDelta
            and (<ToolCallDelta>other).index == self.index
            and (<ToolCallDelta>other).arguments == self.arguments
        )

    __hash__ = None


@cython.final
@cython.freelist(16)
cdef class ToolCallEnd:
    cdef readonly Py_ssize_t index
    cdef readonly bytes raw

    def __init__(self, Py_ssize_t index, bytes raw not None):
        self.index = index
        self.raw = raw

    def __repr__(self):
        return f"ToolCallEnd({self.index}, {self.raw!r})"

    def __eq__(self, other):
        return (
            type(other) is ToolCallEnd
            and (<ToolCallEnd>other).index == self.index
            and (<ToolCallEnd>other).raw == self.raw
        )

    __hash__ = None


@cython.final
cdef class Call:
    cdef readonly Py_ssize_t index
    cdef readonly str name
    cdef str _arguments
    cdef list parts

    @property
    def arguments(self):
        if self._arguments is None:
            self._arguments = "".join(self.parts)
            self.parts = None
        return self._arguments

    def __repr__(self):
        return f"Call({self.index}, {self.name!r}, {self.arguments!r})"


@cython.final
cdef class Result:
    cdef readonly str reasoning
    cdef readonly str content
    cdef readonly tuple calls
    cdef readonly bytes raw
    cdef readonly str finish
    cdef readonly str error
    cdef readonly str detail
    cdef readonly Py_ssize_t void_calls
    cdef readonly bytes cut

    def __repr__(self):
        return (
            f"Result(reasoning={self.reasoning!r}, content={self.content!r}, calls={self.calls!r}, raw={self.raw!r}, "
            f"finish={self.finish!r}, error={self.error!r}, detail={self.detail!r}, void_calls={self.void_calls}, cut={self.cut!r})"
        )

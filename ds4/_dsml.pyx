# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Streaming parser of one assistant turn: bytes in, reasoning, content and tool calls out.

One buffer, three offsets, one state:

        given away       held back            not looked at
    |................|.....................|...............|
    0               sent                  pos              n        (bytes of the buffer)

    START --> REASON --</think>--> GUARD --> TEXT --start tag--> BLOCK --end tag--> DONE
      |         | ^                  |         ^                   |
      |         v | no block         |         | not a block       | a call was announced, then malformed
      |       BLOCK (a candidate)    +---------+                   v
      |         | ends the turn                                  FAILED (the rest is text)
      |         v
      +--> PLAIN (no tools, or raw)     DONE (recovered)

* START waits whether the turn repeats `<think>`. GUARD holds the text after the first `</think>` until a start tag or
  the end says that it is content, or a second `</think>` that it was reasoning (DeepSeek and GLM with tools).
* BLOCK is the grammar of one tool block: DSML in four spellings, GLM, Qwen. Its own state `sub` says which tag comes
  next or how the open value is read: V_STR streams a string, V_JSON streams and checks a container, V_HELD keeps a
  value until its close tag tells its type.
* Inside open reasoning a block is only a candidate: its events wait in `held`. It becomes real if the turn ends right
  after it, and is a thought if anything follows it.

Invariants:

* What was sent stays true: the concatenated events equal `result`, for every split of the input into pieces. So a
  byte leaves the buffer only when no continuation can change its channel: the tail that may still become a tag, the
  white space before a possible block, and an incomplete code point are held.
* Arguments are one valid, compact JSON object once their `ToolCallEnd` was sent. A JSON value is checked while it
  streams; if it goes wrong after its first bytes were sent, the block fails and its calls stay void.
* Every byte is looked at a bounded number of times: `sent` and `pos` only grow, with two exceptions that happen once
  per value (a held value becomes a string) and once per turn (a `</think>` in a candidate turns out to be real).
* Argument text that the length limit cut is never completed; `finish("eos")` completes outer wrappers only.

A parser is owned by one thread at a time. Parsers share constant tables alone, so that they may run at once without
the GIL.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.string cimport memchr, memcmp, memcpy, memmove

import json

cdef extern from "Python.h":
    str PyUnicode_DecodeUTF8Stateful(const char *s, Py_ssize_t n, const char *errors, Py_ssize_t *consumed)


# ---- events -----------------------------------------------------------------------------------------------------


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
    cdef readonly Py_ssize_t void_calls
    cdef readonly bytes cut

    def __repr__(self):
        return (
            f"Result(reasoning={self.reasoning!r}, content={self.content!r}, calls={self.calls!r}, raw={self.raw!r}, "
            f"finish={self.finish!r}, error={self.error!r}, void_calls={self.void_calls}, cut={self.cut!r})"
        )


# ---- bytes ------------------------------------------------------------------------------------------------------


cdef struct Buf:
    char *p
    Py_ssize_t n
    Py_ssize_t cap


cdef int grow(Buf *b, Py_ssize_t more) except -1:
    cdef Py_ssize_t cap = b.cap
    cdef char *p
    if b.n + more > cap:
        cap = max(b.n + more, cap + cap // 2 + 256)
        p = <char *>PyMem_Realloc(b.p, cap)
        if p == NULL:
            raise MemoryError
        b.p = p
        b.cap = cap
    return 0


cdef inline int add(Buf *b, const char *s, Py_ssize_t n) except -1:
    if b.n + n > b.cap:
        grow(b, n)
    memcpy(b.p + b.n, s, n)
    b.n += n
    return 0


cdef inline int put(Buf *b, char c) except -1:
    if b.n == b.cap:
        grow(b, 1)
    b.p[b.n] = c
    b.n += 1
    return 0


cdef inline bint space(unsigned char c) noexcept nogil:
    return c == 32 or 9 <= c <= 13


cdef int put_escaped(Buf *b, unsigned char c) except -1:
    """One byte of a JSON string, escaped where JSON wants it."""
    cdef const char *hexdigits = "0123456789abcdef"
    if c == c'"' or c == c"\\":
        put(b, c"\\")
        put(b, c)
    elif c >= 32:
        put(b, c)
    elif c == c"\n":
        add(b, "\\n", 2)
    elif c == c"\t":
        add(b, "\\t", 2)
    elif c == c"\r":
        add(b, "\\r", 2)
    elif c == 8:
        add(b, "\\b", 2)
    elif c == 12:
        add(b, "\\f", 2)
    else:
        add(b, "\\u00", 4)
        put(b, hexdigits[c >> 4])
        put(b, hexdigits[c & 15])
    return 0


# ---- JSON values: checked and minified byte by byte (RFC 8259) --------------------------------------------------


cdef enum:
    J_VALUE, J_FIRST, J_KEY_OR_END, J_KEY, J_COLON, J_AFTER, J_STR, J_ESC, J_HEX, J_MINUS, J_ZERO, J_INT, J_DOT,
    J_FRAC, J_E, J_ESIGN, J_EXP, J_WORD, J_DONE

cdef enum:
    J_MAX_DEPTH = 512

# Bits of declared types, also the kind of a value.
cdef enum:
    T_STRING = 1
    T_NUMBER = 2
    T_BOOL = 4
    T_NULL = 8
    T_ARRAY = 16
    T_OBJECT = 32
    T_ANY = 64
    T_UNDECLARED = 128

cdef struct Json:
    int state
    int depth
    int hex_left
    bint key
    int kind
    const char *word
    unsigned char open[J_MAX_DEPTH]


cdef void json_reset(Json *j) noexcept nogil:
    j.state = J_VALUE
    j.depth = 0
    j.key = False
    j.kind = 0
    j.hex_left = 0
    j.word = NULL


cdef inline void json_after(Json *j) noexcept nogil:
    j.state = J_AFTER if j.depth else J_DONE


cdef inline bint json_number_may_end(int state) noexcept nogil:
    return state == J_ZERO or state == J_INT or state == J_FRAC or state == J_EXP


cdef bint json_complete(Json *j) noexcept nogil:
    return j.state == J_DONE or (j.depth == 0 and json_number_may_end(j.state))


cdef int json_value(Json *j, unsigned char c, Buf *out) except -1:
    """The first byte of a value. 1: accepted, 0: not JSON."""
    cdef int kind = 0
    if c == c"{" or c == c"[":
        if j.depth == J_MAX_DEPTH:
            return 0
        kind = T_OBJECT if c == c"{" else T_ARRAY
        j.open[j.depth] = c
        j.depth += 1
        j.state = J_KEY_OR_END if c == c"{" else J_FIRST
    elif c == c'"':
        kind = T_STRING
        j.key = False
        j.state = J_STR
    elif c == c"-":
        kind = T_NUMBER
        j.state = J_MINUS
    elif c == c"0":
        kind = T_NUMBER
        j.state = J_ZERO
    elif c"1" <= c <= c"9":
        kind = T_NUMBER
        j.state = J_INT
    elif c == c"t" or c == c"f" or c == c"n":
        kind = T_NULL if c == c"n" else T_BOOL
        j.word = "rue" if c == c"t" else ("alse" if c == c"f" else "ull")
        j.state = J_WORD
    else:
        return 0
    if j.kind == 0:
        j.kind = kind
    put(out, c)
    return 1


cdef int json_step(Json *j, unsigned char c, Buf *out) except -1:
    """The next byte; minified bytes go to `out`. 1: accepted, 0: not JSON. After J_DONE only white space is."""
    cdef int s = j.state
    cdef bint digit = c"0" <= c <= c"9"
    if s == J_STR:
        if c == c'"':
            put(out, c)
            if j.key:
                j.state = J_COLON
            else:
                json_after(j)
        elif c == c"\\":
            put(out, c)
            j.state = J_ESC
        elif c < 32:
            # A raw line feed in a string is the commonest slip of a model; escaped, the value is JSON.
            put_escaped(out, c)
        else:
            put(out, c)
        return 1
    if s == J_ESC:
        if c == c"u":
            j.hex_left = 4
            j.state = J_HEX
        elif c != 0 and memchr(b'"\\/bfnrt', c, 8) != NULL:
            j.state = J_STR
        else:
            return 0
        put(out, c)
        return 1
    if s == J_HEX:
        if not (digit or c"a" <= (c | 32) <= c"f"):
            return 0
        j.hex_left -= 1
        if j.hex_left == 0:
            j.state = J_STR
        put(out, c)
        return 1
    if s == J_WORD:
        if c != <unsigned char>j.word[0]:
            return 0
        put(out, c)
        j.word += 1
        if j.word[0] == 0:
            json_after(j)
        return 1
    if J_MINUS <= s <= J_EXP:
        if digit:
            if s == J_ZERO:
                return 0
            if s == J_MINUS:
                j.state = J_ZERO if c == c"0" else J_INT
            elif s == J_DOT:
                j.state = J_FRAC
            elif s == J_E or s == J_ESIGN:
                j.state = J_EXP
            put(out, c)
            return 1
        if c == c"." and (s == J_ZERO or s == J_INT):
            j.state = J_DOT
            put(out, c)
            return 1
        if (c | 32) == c"e" and (s == J_ZERO or s == J_INT or s == J_FRAC):
            j.state = J_E
            put(out, c)
            return 1
        if (c == c"+" or c == c"-") and s == J_E:
            j.state = J_ESIGN
            put(out, c)
            return 1
        if not json_number_may_end(s):
            return 0
        json_after(j)
        s = j.state
    if c == 32 or c == 9 or c == 10 or c == 13:
        return 1
    if s == J_VALUE:
        return json_value(j, c, out)
    if s == J_FIRST and c != c"]":
        return json_value(j, c, out)
    if s == J_KEY or (s == J_KEY_OR_END and c != c"}"):
        if c != c'"':
            return 0
        j.key = True
        j.state = J_STR
        put(out, c)
        return 1
    if s == J_COLON:
        if c != c":":
            return 0
        j.state = J_VALUE
        put(out, c)
        return 1
    if s == J_AFTER or s == J_FIRST or s == J_KEY_OR_END:
        if c == c"," and s == J_AFTER:
            j.state = J_KEY if j.open[j.depth - 1] == c"{" else J_VALUE
        elif (c == c"}" and j.open[j.depth - 1] == c"{") or (c == c"]" and j.open[j.depth - 1] == c"["):
            j.depth -= 1
            json_after(j)
        else:
            return 0
        put(out, c)
        return 1
    return 0


cdef int json_whole(const char *p, Py_ssize_t n, Buf *out) except -1:
    """Appends the one JSON value that p[:n] is, minified, and returns its kind; 0 (and nothing) if it is none."""
    cdef Json j
    cdef Py_ssize_t i, mark = out.n
    json_reset(&j)
    for i in range(n):
        if not json_step(&j, p[i], out):
            out.n = mark
            return 0
    if not json_complete(&j):
        out.n = mark
        return 0
    return j.kind


# ---- declared types ---------------------------------------------------------------------------------------------


_TYPE_BITS = {
    "string": T_STRING,
    "number": T_NUMBER,
    "integer": T_NUMBER,
    "boolean": T_BOOL,
    "null": T_NULL,
    "array": T_ARRAY,
    "object": T_OBJECT,
}


def _types_of(schema, depth=0):
    """Bits of the types that a JSON schema admits; T_ANY where it does not say."""
    if not isinstance(schema, dict) or depth > 16:
        return T_ANY
    names = schema.get("type")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list) and names:
        bits = 0
        for name in names:
            bits |= _TYPE_BITS.get(name, T_ANY) if isinstance(name, str) else T_ANY
        return bits
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            bits = 0
            for branch in schema[word]:
                bits |= _types_of(branch, depth + 1)
            return bits
    values = schema.get("enum")
    if values is None and "const" in schema:
        values = [schema["const"]]
    if isinstance(values, list) and values:
        bits = 0
        for value in values:
            if isinstance(value, str):
                bits |= T_STRING
            elif isinstance(value, bool):
                bits |= T_BOOL
            elif value is None:
                bits |= T_NULL
            elif isinstance(value, (int, float)):
                bits |= T_NUMBER
            else:
                bits |= T_ARRAY if isinstance(value, list) else T_OBJECT
        return bits
    return T_ANY


def _properties_of(text):
    """property name -> type bits, of a tool's schema or of its parameters' schema; {} if it is not readable."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    for word in ("function", "parameters", "input_schema"):
        if isinstance(schema, dict) and isinstance(schema.get(word), dict) and "properties" not in schema:
            schema = schema[word]
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: _types_of(value) for key, value in properties.items()}


# ---- tags -------------------------------------------------------------------------------------------------------


cdef struct Tag:
    const char *p
    Py_ssize_t n

cdef enum:
    DSML_SPELLINGS = 5

cdef enum:
    K_BLOCK, K_INVOKE, K_PARAM, K_BLOCK_END, K_INVOKE_END, K_PARAM_END, TAG_KINDS

# The fifth spelling is V4.1 with a space before ">". Between values V4.1's end tags may have that space or not; a value
# ends at the exact tag alone (only that one is escaped in it), unless the block began with the space.
cdef list _SPELLED = [
    [s.encode() for s in (f"<{x}{b}{sp}>", f"<{x}invoke", f"<{x}parameter", f"</{x}{b}{sp}>", f"</{x}invoke{sp}>",
                          f"</{x}parameter{sp}>")]
    for x, b, sp in (("｜DSML｜ ", "calls", ""), ("｜DSML｜", "tool_calls", ""), ("DSML｜", "tool_calls", ""),
                     ("", "tool_calls", ""), ("｜DSML｜ ", "calls", " "))
]  # fmt: skip
cdef Tag DSML[DSML_SPELLINGS][TAG_KINDS]
cdef Tag THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END, FUNCTION, FUNCTION_END, PARAM, PARAM_END


cdef void set_tag(Tag *t, bytes literal):
    t.p = PyBytes_AS_STRING(literal)
    t.n = PyBytes_GET_SIZE(literal)


cdef int _i, _k
for _i in range(DSML_SPELLINGS):
    for _k in range(TAG_KINDS):
        set_tag(&DSML[_i][_k], _SPELLED[_i][_k])
set_tag(&THINK, b"<think>")
set_tag(&THINK_END, b"</think>")
set_tag(&CALL, b"<tool_call>")
set_tag(&CALL_END, b"</tool_call>")
set_tag(&KEY, b"<arg_key>")
set_tag(&KEY_END, b"</arg_key>")
set_tag(&VALUE, b"<arg_value>")
set_tag(&VALUE_END, b"</arg_value>")
set_tag(&FUNCTION, b"<function=")
set_tag(&FUNCTION_END, b"</function>")
set_tag(&PARAM, b"<parameter=")
set_tag(&PARAM_END, b"</parameter>")

cdef enum:
    NO, PARTIAL, FULL


cdef inline int match(const char *p, Py_ssize_t n, const Tag *t) noexcept nogil:
    """Is p[:n], n >= 1, the tag (FULL), or a proper prefix of it (PARTIAL)?"""
    if p[0] != t.p[0] or memcmp(p, t.p, n if n < t.n else t.n) != 0:
        return NO
    return FULL if n >= t.n else PARTIAL


cdef str text_of(const char *p, Py_ssize_t n):
    return PyUnicode_DecodeUTF8Stateful(p, n, "replace", NULL)


cdef str unescape_attribute(str s):
    """XML entities of an attribute value. `&amp;` comes last, so that `&amp;lt;` gives `&lt;`."""
    if "&" in s:
        s = s.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&apos;", "'")
        s = s.replace("&amp;", "&")
    return s


cdef enum:
    S_START, S_REASON, S_SKIP, S_GUARD, S_TEXT, S_PLAIN, S_BLOCK, S_FAILED, S_DONE

cdef enum:
    # DSML
    B_TOP, B_INVOKE_TAG, B_INVOKE, B_PARAM_TAG, B_PEEK, B_NESTED,
    # GLM
    G_NAME, G_KEY, G_VALUE, G_NEXT,
    # Qwen
    Q_OPEN, Q_NAME, Q_PARAMS, Q_KEY, Q_CLOSE,
    # values
    V_STR, V_JSON, V_HELD,
    # behind a complete block: another one, or the end
    B_BEHIND

cdef enum:
    X_DSML, X_GLM, X_QWEN, X_PLAIN

cdef enum:
    REASONING, CONTENT

cdef enum:
    COMPACT_AT = 8192
    # White space inside Qwen's closing tags that an implicitly closed parameter may have.
    MAX_GAP = 64

# Bytes of a string value that cannot be copied as they are: controls, quote, backslash, "<", "&".
cdef unsigned char SPECIAL[256]
for _i in range(256):
    SPECIAL[_i] = _i < 32 or _i in b'"\\<&'

_SYNTAXES = {"deepseek4": X_DSML, "deepseek41": X_DSML, "glm": X_GLM, "qwen": X_QWEN, "chatml": X_QWEN, "raw": X_PLAIN}


# ---- the parser -------------------------------------------------------------------------------------------------


@cython.final
cdef class Parser:
    cdef int syntax, state, sub
    cdef bint tools, trim, guard
    cdef dict schemas, properties
    cdef Buf buf, out
    cdef Py_ssize_t sent, pos
    cdef Py_ssize_t ws_from, ws_to     # the white space run that ends at ws_to
    cdef readonly Py_ssize_t steps

    cdef list events, held             # of this feed; of the candidate
    cdef list reasoning, content       # pieces sent
    cdef list done                     # Calls of the block, in order
    cdef Call call                     # the open one
    cdef Py_ssize_t n_calls, void_calls

    # the block
    cdef bint candidate
    cdef int spelling
    cdef Py_ssize_t base               # n_calls before the block
    cdef Py_ssize_t raw_at, inner_at, block_end
    cdef Py_ssize_t think_at           # first </think> inside a value of a candidate, -1 if none
    cdef Py_ssize_t mark, scan         # start of the open tag, name or value; how far it was searched
    cdef bint quoted                   # inside quotes: of a tag, or of a value that is tracked as JSON
    cdef bint escaped
    cdef bint first, nested, nested_first
    cdef bint untyped                  # a parameter without the string attribute
    cdef bint verbatim                 # a string value without escapes
    cdef bint newline                  # a line feed that may be the last of a Qwen value
    cdef bint committed                # the container streams
    cdef unsigned char bracket         # its first byte, 0 before it
    cdef bint declared
    cdef int types
    cdef Py_ssize_t entity_at, entity_n
    cdef Json json
    cdef const Tag *close
    cdef const Tag *close_alt
    cdef Py_ssize_t bad_end            # end of a malformed block that is the last thing so far, -1 if none
    cdef int bad_spelling              # of the malformed block whose end is looked for, -1 if none
    cdef bint closed                   # FAILED, and its end tag was seen
    cdef bytes raw, cut
    cdef str error
    cdef Result _result

    def __cinit__(self):
        self.buf.p = self.out.p = NULL
        self.buf.n = self.buf.cap = self.out.n = self.out.cap = 0

    def __init__(self, str syntax not None, *, bint thinking=False, bint tools=False, schemas=()):
        if syntax not in _SYNTAXES:
            raise ValueError(f"syntax: expected one of {', '.join(_SYNTAXES)}, got {syntax!r}")
        self.syntax = _SYNTAXES[syntax]
        if self.syntax == X_PLAIN and (thinking or tools):
            raise ValueError("syntax: 'raw' has neither thinking nor tools")
        self.tools = tools
        self.trim = syntax == "qwen"
        self.guard = thinking and tools and self.syntax != X_QWEN
        self.schemas = dict(schemas)
        self.properties = {}
        self.buf.n = self.out.n = 0
        self.sent = self.pos = self.ws_from = self.ws_to = self.steps = 0
        self.events = []
        self.held = []
        self.reasoning = []
        self.content = []
        self.done = []
        self.call = None
        self.n_calls = self.void_calls = 0
        self.candidate = self.closed = False
        self.think_at = self.bad_end = self.bad_spelling = -1
        self.entity_at = -1
        self.raw = self.cut = b""
        self.error = None
        self._result = None
        if thinking:
            self.state = S_START
        elif self.trim:
            self.state = S_SKIP
        else:
            self.state = S_TEXT if tools else S_PLAIN

    def __dealloc__(self):
        PyMem_Free(self.buf.p)
        PyMem_Free(self.out.p)

    def feed(self, bytes data not None):
        cdef list events
        if self._result is not None:
            raise RuntimeError("feed after finish")
        add(&self.buf, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        self.run()
        if self.out.n:
            self.flush()
        if self.state != S_BLOCK and self.sent > COMPACT_AT and self.sent > self.buf.n // 2:
            self.compact()
        events = self.events
        self.events = []
        return events

    def finish(self, str cause not None):
        cdef Result r
        cdef str finish
        if cause not in ("eos", "length", "stop", "error"):
            raise ValueError(f"cause: expected eos, length, stop or error, got {cause!r}")
        if self._result is not None:
            raise RuntimeError("finish twice")
        self.end(cause)
        if self.done:
            finish = "tool_calls"
        elif cause == "length":
            finish = "length"
        elif cause == "error" or self.error == "unterminated tool call":
            finish = "error"
        else:
            finish = "stop"
        r = Result.__new__(Result)
        r.reasoning = "".join(self.reasoning)
        r.content = "".join(self.content)
        r.calls = tuple(self.done)
        r.raw = self.raw
        r.finish = finish
        r.error = self.error
        r.void_calls = self.void_calls
        r.cut = self.cut
        self._result = r
        self.state = S_DONE
        events = self.events
        self.events = []
        return events

    @property
    def greedy(self):
        if self.state != S_BLOCK or self.candidate or self.sub == B_BEHIND:
            return False
        if self.sub == V_JSON:
            return not (J_STR <= self.json.state <= J_HEX)
        if self.sub == V_HELD or self.sub == V_STR:
            if self.untyped:
                return not self.quoted
            # A close tag that has begun is structure; a lone "<" may still be text.
            return (
                self.buf.n - self.pos >= 2
                and self.close_match(self.pos) == PARTIAL
            )
        return True

    @property
    def stop_now(self):
        return self.state == S_DONE or (self.state == S_FAILED and self.closed)

    @property
    def reasoning_open(self):
        return self.state == S_START or self.state == S_REASON or (self.state == S_BLOCK and self.candidate)

    @property
    def calls(self):
        return 0 if self.candidate else self.n_calls

    @property
    def result(self):
        if self._result is None:
            raise RuntimeError("no result before finish")
        return self._result

    # ---- sending ------------------------------------------------------------------------------------------------

    cdef int send(self, int channel, Py_ssize_t end) except -1:
        """Gives away [sent, end). At the end of the buffer an incomplete code point stays."""
        cdef Py_ssize_t n = end - self.sent
        cdef str text
        cdef ReasoningDelta r
        cdef ContentDelta c
        if n <= 0:
            return 0
        if end == self.buf.n:
            text = PyUnicode_DecodeUTF8Stateful(self.buf.p + self.sent, n, "replace", &n)
            if n == 0:
                return 0
        else:
            text = PyUnicode_DecodeUTF8Stateful(self.buf.p + self.sent, n, "replace", NULL)
        self.sent += n
        if channel == REASONING:
            r = ReasoningDelta.__new__(ReasoningDelta)
            r.text = text
            self.events.append(r)
            self.reasoning.append(text)
        else:
            c = ContentDelta.__new__(ContentDelta)
            c.text = text
            self.events.append(c)
            self.content.append(text)
        return 0

    cdef int send_last(self, int channel, Py_ssize_t end) except -1:
        """As `send`, for bytes that nothing of this channel follows: an incomplete code point is repaired."""
        cdef str text
        self.send(channel, end)
        if self.sent < end:
            text = text_of(self.buf.p + self.sent, end - self.sent)
            self.sent = end
            self.events.append(ReasoningDelta(text) if channel == REASONING else ContentDelta(text))
            (self.reasoning if channel == REASONING else self.content).append(text)
        return 0

    cdef Py_ssize_t before_space(self, Py_ssize_t end):
        """Start of the white space run that ends at `end`, at least `sent`; amortised constant time."""
        cdef Py_ssize_t i = end
        cdef Py_ssize_t floor = self.sent
        if self.ws_to > floor and self.ws_to <= end:
            floor = self.ws_to
        while i > floor and space(self.buf.p[i - 1]):
            i -= 1
            self.steps += 1
        if i == self.ws_to and i > self.sent:
            i = self.ws_from if self.ws_from > self.sent else self.sent
        self.ws_from = i
        self.ws_to = end
        return i

    cdef int flow(self, int channel, Py_ssize_t end) except -1:
        """Sends text up to `end`, less the white space that a block or the end of reasoning would swallow."""
        if self.tools or (self.trim and channel == REASONING):
            end = self.before_space(end)
        return self.send(channel, end)

    cdef int flush(self) except -1:
        """Gives away the argument text in `out`, less an incomplete code point."""
        cdef Py_ssize_t n = self.out.n
        cdef ToolCallDelta d
        cdef str text
        if n == 0:
            return 0
        text = PyUnicode_DecodeUTF8Stateful(self.out.p, n, "replace", &n)
        if n == 0:
            return 0
        memmove(self.out.p, self.out.p + n, self.out.n - n)
        self.out.n -= n
        d = ToolCallDelta.__new__(ToolCallDelta)
        d.index = self.call.index
        d.arguments = text
        (self.held if self.candidate else self.events).append(d)
        self.call.parts.append(text)
        return 0

    cdef void compact(self) noexcept:
        cdef Py_ssize_t k = self.sent
        memmove(self.buf.p, self.buf.p + k, self.buf.n - k)
        self.buf.n -= k
        self.pos -= k
        self.sent = 0
        self.ws_from = max(self.ws_from - k, 0)
        self.ws_to = max(self.ws_to - k, 0)
        # Sent text behind a malformed block means that the block is not the last thing.
        self.bad_end = self.bad_end - k if self.bad_end >= k else -1

    # ---- text ---------------------------------------------------------------------------------------------------

    cdef int run(self) except -1:
        cdef Py_ssize_t n = self.buf.n
        cdef bint more = True
        while more:
            if self.state == S_TEXT:
                more = self.text()
            elif self.state == S_BLOCK:
                more = self.block()
            elif self.state == S_REASON:
                more = self.reason()
            elif self.state == S_PLAIN:
                self.steps += n - self.pos
                self.pos = n
                self.send(CONTENT, n)
                more = False
            elif self.state == S_GUARD:
                more = self.guarded()
            elif self.state == S_SKIP:
                while self.pos < n and self.buf.p[self.pos] == c"\n":
                    self.pos += 1
                self.sent = self.pos
                more = self.pos < n
                if more:
                    self.state = S_TEXT if self.tools else S_PLAIN
            elif self.state == S_START:
                more = self.start()
            elif self.state == S_FAILED:
                more = self.failed()
            else:
                self.pos = self.sent = n
                more = False
        return 0

    cdef int start(self) except -1:
        cdef int m
        if self.buf.n == 0:
            return 0
        m = match(self.buf.p, self.buf.n, &THINK)
        if m == PARTIAL:
            return 0
        if m == FULL:
            self.sent = self.pos = THINK.n
        self.state = S_REASON
        return 1

    cdef int find_start(self, Py_ssize_t at, int *spelling, Py_ssize_t *length) noexcept:
        """Does a block start at `at`? The spelling and its length are set when FULL."""
        cdef const char *p = self.buf.p + at
        cdef Py_ssize_t n = self.buf.n - at
        cdef int i, m, best = NO
        if self.syntax != X_DSML:
            spelling[0] = 0
            length[0] = CALL.n
            return match(p, n, &CALL)
        for i in range(DSML_SPELLINGS):
            m = match(p, n, &DSML[i][K_BLOCK])
            if m == FULL:
                spelling[0] = i
                length[0] = DSML[i][K_BLOCK].n
                return FULL
            if m == PARTIAL:
                best = PARTIAL
        return best

    cdef Py_ssize_t next_lt(self, Py_ssize_t at) noexcept:
        """Offset of the next "<" from `at`, or the end of the buffer."""
        cdef Py_ssize_t n = self.buf.n
        cdef const char *q = NULL
        if at < n:
            q = <const char *>memchr(self.buf.p + at, c"<", n - at)
        if q != NULL:
            n = q - self.buf.p
        self.steps += n - at + 1
        return n

    cdef int reason(self) except -1:
        cdef Py_ssize_t i, length = 0
        cdef int m, k = NO, spelling = 0
        while True:
            i = self.next_lt(self.pos)
            if i == self.buf.n:
                self.pos = i
                self.flow(REASONING, i)
                return 0
            m = match(self.buf.p + i, self.buf.n - i, &THINK_END)
            if m == FULL:
                self.close_reasoning(i)
                return 1
            if self.tools:
                k = self.find_start(i, &spelling, &length)
            if k == FULL:
                self.send_last(REASONING, self.before_space(i))
                self.open_block(i, length, spelling, True)
                return 1
            if m == PARTIAL or k == PARTIAL:
                self.pos = i
                self.flow(REASONING, i)
                return 0
            self.pos = i + 1

    cdef int close_reasoning(self, Py_ssize_t at) except -1:
        """`</think>` at `at` ends the reasoning."""
        cdef Py_ssize_t end = at
        if self.trim:
            while end > self.sent and self.buf.p[end - 1] == c"\n":
                end -= 1
        self.send_last(REASONING, end)
        self.sent = self.pos = at + THINK_END.n
        if self.trim:
            self.state = S_SKIP
        elif self.guard:
            self.state = S_GUARD
        else:
            self.state = S_TEXT if self.tools else S_PLAIN
        return 0

    cdef int guarded(self) except -1:
        cdef Py_ssize_t i, length = 0
        cdef int m, k, spelling = 0
        while True:
            i = self.next_lt(self.pos)
            self.pos = i
            if i == self.buf.n:
                return 0
            m = match(self.buf.p + i, self.buf.n - i, &THINK_END)
            k = self.find_start(i, &spelling, &length)
            if m == FULL:
                self.send_last(REASONING, i)
                self.sent = self.pos = i + THINK_END.n
                self.state = S_TEXT
                return 1
            if k == FULL:
                self.state = S_TEXT
                return 1
            if m == PARTIAL or k == PARTIAL:
                return 0
            self.pos = i + 1

    cdef int text(self) except -1:
        cdef Py_ssize_t i, length = 0
        cdef int k, m, spelling = 0
        while True:
            i = self.next_lt(self.pos)
            if i == self.buf.n:
                self.pos = i
                self.flow(CONTENT, i)
                return 0
            k = self.find_start(i, &spelling, &length)
            if k == FULL:
                self.send_last(CONTENT, self.before_space(i))
                self.open_block(i, length, spelling, False)
                return 1
            m = NO
            if self.bad_spelling >= 0:
                m = self.match_end(i, self.bad_spelling, &length)
                if m == FULL:
                    self.bad_end = i + length
                    self.pos = self.bad_end
                    continue
            if k == PARTIAL or m == PARTIAL:
                self.pos = i
                self.flow(CONTENT, i)
                return 0
            self.pos = i + 1

    cdef int failed(self) except -1:
        """After a block with announced calls went wrong: everything is text, its end tag ends the decoding."""
        cdef Py_ssize_t i, length = 0
        cdef int m = NO
        while True:
            i = self.next_lt(self.pos)
            if i < self.buf.n and not self.closed:
                m = self.match_end(i, self.spelling, &length)
                if m == FULL:
                    self.closed = True
                elif m == NO:
                    self.pos = i + 1
                    continue
            self.pos = i if m == PARTIAL else self.buf.n
            self.send(CONTENT, self.pos)
            return 0

    cdef int match_end(self, Py_ssize_t at, int spelling, Py_ssize_t *length) noexcept:
        """Does the end tag of a block stand at `at`?"""
        if self.syntax != X_DSML:
            length[0] = CALL_END.n
            return match(self.buf.p + at, self.buf.n - at, &CALL_END)
        return self.match_dsml(at, spelling, K_BLOCK_END, length)

    cdef int match_dsml(self, Py_ssize_t at, int spelling, int kind, Py_ssize_t *length) noexcept:
        """Does this tag stand at `at`? V4.1's with or without a space before ">"."""
        cdef const char *p = self.buf.p + at
        cdef Py_ssize_t n = self.buf.n - at
        cdef int other, m = match(p, n, &DSML[spelling][kind])
        length[0] = DSML[spelling][kind].n
        if m != FULL and (spelling == 0 or spelling == 4):
            other = match(p, n, &DSML[4 - spelling][kind])
            if other == FULL:
                length[0] = DSML[4 - spelling][kind].n
            if other > m:
                m = other
        return m

    # ---- a block ------------------------------------------------------------------------------------------------

    cdef int open_block(self, Py_ssize_t at, Py_ssize_t length, int spelling, bint candidate) except -1:
        cdef const char *p = self.buf.p
        self.raw_at = at
        if at - self.sent >= 2 and p[at - 1] == c"\n" and p[at - 2] == c"\n":
            self.raw_at = at - 2
        self.pos = self.inner_at = at + length
        self.spelling = spelling
        self.candidate = candidate
        self.base = self.n_calls
        self.think_at = self.bad_end = -1
        self.state = S_BLOCK
        self.open_call_syntax()
        return 0

    cdef void open_call_syntax(self) noexcept:
        if self.syntax == X_DSML:
            self.sub = B_TOP
        elif self.syntax == X_GLM:
            self.sub = G_NAME
            self.scan = self.pos
        else:
            self.sub = Q_OPEN

    cdef int drop_calls(self) except -1:
        del self.done[:]
        del self.held[:]
        self.call = None
        self.out.n = 0
        return 0

    cdef int violate(self, Py_ssize_t at) except -1:
        """The block breaks its grammar at `at`. Returns 1: the caller goes on in the new state."""
        if self.candidate:
            return self.not_a_call(at)
        if self.n_calls > self.base:
            self.flush()
            self.void_calls += self.n_calls - self.base
            self.error = "invalid tool call"
            self.state = S_FAILED
        else:
            self.bad_spelling = self.spelling
            self.state = S_TEXT
        self.drop_calls()
        self.pos = at
        return 1

    cdef int not_a_call(self, Py_ssize_t at) except -1:
        """The candidate is a thought: back to reasoning, at `at` or after the `</think>` that it had swallowed."""
        self.drop_calls()
        self.n_calls = self.base
        self.candidate = False
        if self.think_at >= 0:
            self.close_reasoning(self.think_at)
        else:
            self.pos = at
            self.state = S_REASON
        return 1

    cdef int complete(self, bytes added) except -1:
        """The block is whole: its calls count. `added` is the wrapper that the model forgot."""
        cdef Call call
        cdef ToolCallEnd e
        self.raw = PyBytes_FromStringAndSize(self.buf.p + self.raw_at, self.block_end - self.raw_at) + added
        if self.candidate:
            self.events.extend(self.held)
            del self.held[:]
            self.candidate = False
        for call in self.done:
            e = ToolCallEnd.__new__(ToolCallEnd)
            e.index = call.index
            e.raw = self.raw
            self.events.append(e)
        if not self.done:
            self.raw = b""
        self.sent = self.pos = self.buf.n
        self.state = S_DONE
        return 1

    cdef int begin_call(self, str name) except -1:
        cdef ToolCallStart e = ToolCallStart.__new__(ToolCallStart)
        cdef Call call = Call.__new__(Call)
        call.index = e.index = self.n_calls
        call.name = e.name = name
        call.parts = []
        self.call = call
        self.n_calls += 1
        self.first = True
        self.nested = False
        put(&self.out, c"{")
        (self.held if self.candidate else self.events).append(e)
        return 0

    cdef int end_call(self) except -1:
        put(&self.out, c"}")
        self.flush()
        self.done.append(self.call)
        self.call = None
        return 0

    cdef int put_key(self, str key) except -1:
        cdef bytes utf8 = key.encode()
        cdef const char *p = PyBytes_AS_STRING(utf8)
        cdef Py_ssize_t i
        if self.nested:
            if not self.nested_first:
                put(&self.out, c",")
            self.nested_first = False
        else:
            if not self.first:
                put(&self.out, c",")
            self.first = False
        put(&self.out, c'"')
        for i in range(PyBytes_GET_SIZE(utf8)):
            put_escaped(&self.out, p[i])
        add(&self.out, '":', 2)
        return 0

    cdef int skip_space(self) noexcept:
        """Moves `pos` to the next byte that is no white space; 0 at the end of the buffer."""
        while self.pos < self.buf.n and space(self.buf.p[self.pos]):
            self.pos += 1
            self.steps += 1
        self.steps += 1
        return self.pos < self.buf.n

    cdef int at(self, const Tag *t) noexcept:
        return match(self.buf.p + self.pos, self.buf.n - self.pos, t)

    cdef int block(self) except -1:
        """One step of the block's grammar. 1: go on, 0: more input is needed."""
        cdef int s = self.sub
        if s == V_STR:
            return self.string_value()
        if s == V_JSON:
            return self.json_value()
        if s == V_HELD:
            return self.held_value()
        if s == B_INVOKE_TAG or s == B_PARAM_TAG:
            return self.dsml_tag()
        if s == B_PEEK:
            return self.peek()
        if s == G_NAME:
            return self.glm_name()
        if s == G_KEY:
            return self.glm_key()
        if s == Q_NAME or s == Q_KEY:
            return self.qwen_name()
        if not self.skip_space():
            return 0
        if s == B_BEHIND:
            return self.behind()
        if s == B_TOP or s == B_INVOKE or s == B_NESTED:
            return self.dsml_between()
        return self.xml_between()

    cdef int behind(self) except -1:
        """After a complete block. GLM and Qwen repeat it per call; anything else ends the calls."""
        cdef int m = NO
        if self.syntax != X_DSML:
            m = self.at(&CALL)
            if m == FULL:
                self.pos += CALL.n
                self.open_call_syntax()
                return 1
        if self.candidate:
            if self.at(&THINK_END) == PARTIAL:
                m = PARTIAL
            elif m == NO:
                return self.not_a_call(self.pos)
        if m == PARTIAL:
            return 0
        return self.complete(b"")

    cdef int block_ended(self, Py_ssize_t length) except -1:
        """The end tag, `length` bytes, stands at `pos`."""
        if self.candidate and not self.done:
            return self.violate(self.pos)
        self.pos += length
        self.block_end = self.pos
        self.think_at = -1
        if self.candidate or self.syntax != X_DSML:
            self.sub = B_BEHIND
            return 1
        return self.complete(b"")

    # ---- DSML ---------------------------------------------------------------------------------------------------

    cdef int opening(self, int kind) noexcept:
        """Does an invoke or parameter tag open at `pos`? Its name must be followed by ">" or white space."""
        cdef const Tag *t = &DSML[self.spelling][kind]
        cdef int m = self.at(t)
        cdef unsigned char c
        if m == FULL:
            if self.pos + t.n == self.buf.n:
                return PARTIAL
            c = self.buf.p[self.pos + t.n]
            if c != c">" and not space(c):
                return NO
        return m

    cdef int dsml_between(self) except -1:
        cdef int s = self.sub
        cdef int kind = K_INVOKE if s == B_TOP else K_PARAM
        cdef Py_ssize_t length = 0
        cdef int m, e
        m = self.opening(kind)
        if m == FULL:
            self.mark = self.pos
            self.scan = self.pos + DSML[self.spelling][kind].n
            self.quoted = False
            self.sub = B_INVOKE_TAG if kind == K_INVOKE else B_PARAM_TAG
            return 1
        if s == B_TOP:
            e = self.match_dsml(self.pos, self.spelling, K_BLOCK_END, &length)
            if e == FULL:
                return self.block_ended(length)
        else:
            e = self.match_dsml(self.pos, self.spelling, K_INVOKE_END, &length)
            if e == FULL:
                if s == B_NESTED:
                    self.end_nested()
                self.end_call()
                self.pos += length
                self.sub = B_TOP
                return 1
            if s == B_NESTED:
                if self.match_dsml(self.pos, self.spelling, K_PARAM_END, &length) == FULL:
                    self.end_nested()
                    self.pos += length
                    self.sub = B_INVOKE
                    return 1
                if self.match_dsml(self.pos, self.spelling, K_PARAM_END, &length) == PARTIAL:
                    e = PARTIAL
        if m == PARTIAL or e == PARTIAL:
            return 0
        return self.violate(self.pos)

    cdef int end_nested(self) except -1:
        put(&self.out, c"}")
        self.nested = False
        return 0

    cdef str attribute(self, bytes name, Py_ssize_t end):
        """Value of ` name="..."` in the tag [mark, end), None if there is none."""
        cdef const char *p = self.buf.p
        cdef Py_ssize_t i = self.mark, n = len(name)
        cdef const char *want = PyBytes_AS_STRING(name)
        cdef const char *q
        cdef bint quoted = False
        while i < end:
            if p[i] == c'"':
                quoted = not quoted
            elif not quoted and space(p[i]) and end - i > n and memcmp(p + i + 1, want, n) == 0:
                i += 1 + n
                q = <const char *>memchr(p + i, c'"', end - i)
                if q == NULL:
                    return None
                return unescape_attribute(text_of(p + i, q - p - i))
            i += 1
        return None

    cdef int dsml_tag(self) except -1:
        """An invoke or parameter tag up to its ">"."""
        cdef const char *p = self.buf.p
        cdef Py_ssize_t i = self.scan
        cdef str name, typed
        while i < self.buf.n:
            self.steps += 1
            if p[i] == c'"':
                self.quoted = not self.quoted
            elif self.quoted:
                if p[i] == c"\n":
                    return self.violate(i)
            elif p[i] == c"<":
                return self.violate(i)
            elif p[i] == c">":
                break
            i += 1
        self.scan = i
        if i == self.buf.n:
            return 0
        name = self.attribute(b'name="', i)
        if name is None or (not name and self.sub == B_INVOKE_TAG):
            return self.violate(i)
        self.pos = i + 1
        if self.sub == B_INVOKE_TAG:
            self.begin_call(name)
            self.sub = B_INVOKE
            return 1
        self.put_key(name)
        self.close = &DSML[self.spelling][K_PARAM_END]
        self.close_alt = NULL
        if self.spelling == 4:
            self.close_alt = &DSML[0][K_PARAM_END]
        typed = self.attribute(b'string="', i)
        self.untyped = self.quoted = self.escaped = False
        self.declared = False
        if typed is None:
            self.untyped = True
            self.mark = self.scan = self.pos
            if self.nested:
                self.begin_string()
            else:
                self.sub = B_PEEK
        elif typed == "true":
            self.begin_string()
        else:
            self.untyped = True
            self.types = T_ANY
            self.begin_json()
        return 1

    cdef int peek(self) except -1:
        """A parameter without the string attribute holds parameters, or else is a string."""
        cdef Py_ssize_t value = self.pos
        cdef int m
        self.pos = self.scan
        if self.skip_space():
            m = self.opening(K_PARAM)
        else:
            m = PARTIAL
        self.scan = self.pos
        if m == FULL:
            put(&self.out, c"{")
            self.nested = self.nested_first = True
            self.sub = B_NESTED
            return 1
        self.pos = value
        if m == PARTIAL:
            return 0
        self.begin_string()
        return 1

    # ---- GLM and Qwen -------------------------------------------------------------------------------------------

    cdef int xml_between(self) except -1:
        """The tag that comes next, at `pos`."""
        cdef int s = self.sub
        cdef const Tag *a = NULL
        cdef const Tag *b = NULL
        cdef int m
        if s == G_VALUE:
            a = &VALUE
        elif s == G_NEXT:
            a = &KEY
            b = &CALL_END
        elif s == Q_OPEN:
            a = &FUNCTION
        elif s == Q_PARAMS:
            a = &PARAM
            b = &FUNCTION_END
        else:
            b = &CALL_END
        m = self.at(a) if a != NULL else NO
        if m == FULL:
            self.pos += a.n
            self.mark = self.scan = self.pos
            if s == G_VALUE:
                self.close = &VALUE_END
                self.close_alt = NULL
                self.begin_typed()
            elif s == G_NEXT:
                self.sub = G_KEY
            else:
                self.sub = Q_NAME if s == Q_OPEN else Q_KEY
            return 1
        if b != NULL:
            m = max(m, self.at(b))
            if m == FULL:
                if s == Q_PARAMS:
                    self.end_call()
                    self.pos += b.n
                    self.sub = Q_CLOSE
                    return 1
                if s == G_NEXT:
                    self.end_call()
                return self.block_ended(b.n)
        return 0 if m == PARTIAL else self.violate(self.pos)

    cdef int glm_name(self) except -1:
        cdef Py_ssize_t i = self.next_lt(self.scan)
        cdef Py_ssize_t a = self.pos, b = i
        cdef int m, e
        self.scan = i
        if i == self.buf.n:
            return 0
        m = match(self.buf.p + i, self.buf.n - i, &KEY)
        e = match(self.buf.p + i, self.buf.n - i, &CALL_END)
        if m != FULL and e != FULL:
            return 0 if m == PARTIAL or e == PARTIAL else self.violate(i)
        while a < b and space(self.buf.p[a]):
            a += 1
        while b > a and space(self.buf.p[b - 1]):
            b -= 1
        # A line break in the name: prose that speaks of the tag.
        if a == b or memchr(self.buf.p + a, c"\n", b - a) != NULL:
            return self.violate(i)
        self.begin_call(text_of(self.buf.p + a, b - a))
        self.pos = i
        self.sub = G_NEXT
        return 1

    cdef int glm_key(self) except -1:
        cdef Py_ssize_t i, a, b
        cdef int m
        while True:
            i = self.next_lt(self.scan)
            self.scan = i
            if i == self.buf.n:
                return 0
            m = match(self.buf.p + i, self.buf.n - i, &KEY_END)
            if m == FULL:
                break
            if m == PARTIAL:
                return 0
            m = self.thought(i)
            if m != NO:
                return m == FULL
            self.scan = i + 1
        a = self.pos
        b = i
        while a < b and space(self.buf.p[a]):
            a += 1
        while b > a and space(self.buf.p[b - 1]):
            b -= 1
        self.set_key(unescape(self.buf.p + a, b - a, &KEY_END))
        self.pos = i + KEY_END.n
        self.sub = G_VALUE
        return 1

    cdef int qwen_name(self) except -1:
        """A function or parameter name, up to ">"."""
        cdef const char *p = self.buf.p
        cdef Py_ssize_t i = self.scan
        while i < self.buf.n and p[i] != c">":
            if p[i] == c"<" or p[i] == c"\n":
                return self.violate(i)
            i += 1
            self.steps += 1
        self.scan = i
        if i == self.buf.n:
            return 0
        if i == self.pos:
            return self.violate(i)
        name = text_of(p + self.pos, i - self.pos)
        self.pos = i + 1
        if self.sub == Q_NAME:
            self.begin_call(name)
            self.sub = Q_PARAMS
            return 1
        self.set_key(name)
        self.close = &PARAM_END
        self.close_alt = NULL
        self.begin_typed()
        return 1

    cdef int set_key(self, str key) except -1:
        """Writes the key of a GLM or Qwen argument and looks up its declared types."""
        cdef str name = self.call.name
        properties = self.properties.get(name)
        if properties is None:
            schema = self.schemas.get(name)
            properties = {} if schema is None else _properties_of(schema)
            self.properties[name] = properties
        types = properties.get(key)
        self.declared = types is not None
        self.types = types if self.declared else T_UNDECLARED
        self.put_key(key)
        return 0

    cdef int begin_typed(self) except -1:
        """A value whose type the schema tells, or only its text."""
        self.untyped = self.quoted = self.escaped = False
        if self.types == T_STRING or (self.types == T_UNDECLARED and self.syntax == X_GLM):
            return self.begin_string()
        self.mark = self.pos
        self.sub = V_HELD
        return 0

    # ---- values -------------------------------------------------------------------------------------------------

    cdef int close_match(self, Py_ssize_t i) noexcept:
        cdef int m = match(self.buf.p + i, self.buf.n - i, self.close)
        if self.close_alt != NULL:
            m = max(m, match(self.buf.p + i, self.buf.n - i, self.close_alt))
        return m

    cdef Py_ssize_t close_length(self, Py_ssize_t i) noexcept:
        if match(self.buf.p + i, self.buf.n - i, self.close) == FULL:
            return self.close.n
        return self.close_alt.n

    cdef int thought(self, Py_ssize_t i) except -1:
        """"<" at `i` inside a value of a candidate: does it tell that the reasoning goes on or has ended?

        PARTIAL: wait. FULL: the candidate was left. A `</think>` is data if the value gets its close tag, unless a
        new block starts behind it.
        """
        cdef int m, k, spelling = 0
        cdef Py_ssize_t length = 0
        if not self.candidate:
            return NO
        m = match(self.buf.p + i, self.buf.n - i, &THINK_END)
        if m == FULL:
            if self.think_at < 0:
                self.think_at = i
            return NO
        k = self.find_start(i, &spelling, &length)
        if k == FULL and self.think_at >= 0:
            self.not_a_call(i)
            return FULL
        return PARTIAL if m == PARTIAL or (k == PARTIAL and self.think_at >= 0) else NO

    cdef int begin_string(self) except -1:
        put(&self.out, c'"')
        self.mark = self.pos
        self.newline = False
        self.verbatim = False
        self.entity_at = -1
        self.sub = V_STR
        return 0

    cdef int end_value(self, Py_ssize_t i, Py_ssize_t length) except -1:
        """The value ends at `i`, its close tag has `length` bytes."""
        self.pos = i + length
        if self.syntax == X_GLM:
            self.sub = G_NEXT
        elif self.syntax == X_QWEN:
            self.sub = Q_PARAMS
        else:
            self.sub = B_NESTED if self.nested else B_INVOKE
        return 1

    cdef int string_value(self) except -1:
        cdef const unsigned char *p = <const unsigned char *>self.buf.p
        cdef Py_ssize_t i = self.pos, run, n = self.buf.n
        cdef bint qwen = self.syntax == X_QWEN
        cdef unsigned char c
        cdef int m
        while i < n:
            run = i
            while i < n and not SPECIAL[p[i]]:
                i += 1
            self.steps += i - run + 1
            if i > run:
                if self.newline:
                    add(&self.out, "\\n", 2)
                    self.newline = False
                add(&self.out, self.buf.p + run, i - run)
                self.escaped = False
                if i == n:
                    break
            c = p[i]
            if c == c"<":
                m = self.close_match(i)
                if m == FULL:
                    put(&self.out, c'"')
                    return self.end_value(i, self.close_length(i))
                if m == NO:
                    m = self.thought(i)
                    if m == FULL:
                        return 1
                if m == NO and qwen and self.declared and self.implicit_close(i) >= 0:
                    m = PARTIAL
                if m == PARTIAL:
                    break
            elif c == c"&" and not self.verbatim:
                m = self.entity(i)
                if m == PARTIAL:
                    break
                if m == FULL:
                    if self.newline:
                        add(&self.out, "\\n", 2)
                        self.newline = False
                    if p[i + 1] == c"l":
                        put(&self.out, c"<")
                        i += 4
                    else:
                        put(&self.out, c"&")
                        i += 5
                    continue
            elif c == c"\n" and qwen:
                # The line feed after the open tag and the one before the close tag are not part of the value.
                if self.newline:
                    add(&self.out, "\\n", 2)
                self.newline = i > self.mark
                i += 1
                continue
            if self.newline:
                add(&self.out, "\\n", 2)
                self.newline = False
            if self.untyped:
                if c == c'"' and not self.escaped:
                    self.quoted = not self.quoted
                self.escaped = c == c"\\" and self.quoted and not self.escaped
            put_escaped(&self.out, c)
            i += 1
        self.pos = i
        return 0

    cdef int entity(self, Py_ssize_t i) noexcept:
        """Is "&" at `i` the start of an escaped close tag: "&", any "amp;", "lt;", the close tag less its "<"?

        How far the chain was followed is remembered, so that a chain fed byte by byte costs linear time.
        """
        cdef const char *p = self.buf.p
        cdef Py_ssize_t n = self.buf.n
        cdef Py_ssize_t k
        cdef Tag rest
        if self.entity_at != i:
            self.entity_at = i
            self.entity_n = 1
        k = i + self.entity_n
        while n - k >= 4 and memcmp(p + k, b"amp;", 4) == 0:
            k += 4
            self.steps += 4
        self.entity_n = k - i
        if n - k < 4 and memcmp(p + k, b"amp;", n - k) == 0:
            return PARTIAL
        if n - k < 3:
            return PARTIAL if memcmp(p + k, b"lt;", n - k) == 0 else NO
        if memcmp(p + k, b"lt;", 3) != 0:
            return NO
        k += 3
        if k == n:
            return PARTIAL
        rest.p = self.close.p + 1
        rest.n = self.close.n - 1
        return match(p + k, n - k, &rest)

    cdef Py_ssize_t implicit_close(self, Py_ssize_t i) noexcept:
        """Are [i, n) the closing tags of a Qwen call, or may they become them? n - i in all, or -1.

        The end of a function ends an open parameter; that these tags are not text of the value is known only when
        the turn ends behind them.
        """
        cdef const char *p = self.buf.p
        cdef Py_ssize_t n = self.buf.n, k = i, gap
        cdef const Tag *t
        cdef int round, m
        for round in range(2):
            t = &FUNCTION_END if round == 0 else &CALL_END
            m = match(p + k, n - k, t)
            if m == PARTIAL:
                return n - i
            if m == NO:
                return -1
            k += t.n
            gap = k
            while k < n and space(p[k]):
                k += 1
                self.steps += 1
                if k - gap > MAX_GAP:
                    return -1
            if k == n:
                return n - i
        return -1

    cdef int begin_json(self) except -1:
        json_reset(&self.json)
        self.committed = False
        self.bracket = 0
        self.mark = self.pos
        self.sub = V_JSON
        return 0

    cdef int json_value(self) except -1:
        """A container streams from its second token on; everything else waits for its close tag."""
        cdef const unsigned char *p = <const unsigned char *>self.buf.p
        cdef Py_ssize_t i = self.pos, n = self.buf.n
        cdef int m
        cdef Json *j = &self.json
        if not self.committed:
            return self.json_head()
        while i < n:
            self.steps += 1
            if p[i] == c"<":
                m = self.close_match(i)
                if m == FULL:
                    if j.state != J_DONE:
                        return self.violate(i)
                    return self.end_value(i, self.close_length(i))
                if m == NO:
                    m = self.thought(i)
                    if m == FULL:
                        return 1
                if m == PARTIAL:
                    break
            # Behind the first value everything is dropped: one brace too many is a common slip.
            if j.state != J_DONE and not json_step(j, p[i], &self.out):
                return self.violate(i)
            i += 1
        self.pos = i
        return 0

    cdef int json_head(self) except -1:
        """Decides whether the value is a container that may stream: its bracket waits for a second token."""
        cdef Py_ssize_t i = self.pos, out = self.out.n
        cdef unsigned char c
        while i < self.buf.n:
            self.steps += 1
            c = self.buf.p[i]
            i += 1
            if c == 32 or c == 9 or c == 10 or c == 13:
                continue
            if self.bracket:
                put(&self.out, self.bracket)
                if json_step(&self.json, c, &self.out):
                    self.committed = True
                    self.pos = i
                    return 1
                self.out.n = out
            elif c == c"{" or c == c"[":
                self.bracket = c
                json_step(&self.json, c, &self.out)
                self.out.n = out
                continue
            self.pos = self.mark
            self.sub = V_HELD
            return 1
        self.pos = i
        return 0

    cdef int held_value(self) except -1:
        cdef const char *p = self.buf.p
        cdef Py_ssize_t i = self.pos, n = self.buf.n
        cdef int m
        while i < n:
            self.steps += 1
            if p[i] == c"<":
                m = self.close_match(i)
                if m == FULL:
                    return self.decide_value(i, self.close_length(i))
                if m == NO:
                    m = self.thought(i)
                    if m == FULL:
                        return 1
                if m == PARTIAL:
                    break
            elif self.untyped:
                if p[i] == c'"' and not self.escaped:
                    self.quoted = not self.quoted
                self.escaped = p[i] == c"\\" and self.quoted and not self.escaped
            i += 1
        self.pos = i
        return 0

    cdef int decide_value(self, Py_ssize_t end, Py_ssize_t length) except -1:
        """A held value [mark, end) is complete: JSON if it is and may be, else a string."""
        cdef Py_ssize_t a = self.mark, b = end, mark = self.out.n
        cdef int kind
        cdef bint as_json
        while a < b and space(self.buf.p[a]):
            a += 1
        while b > a and space(self.buf.p[b - 1]):
            b -= 1
        self.steps += end - self.mark
        if self.syntax == X_DSML and a == b:
            add(&self.out, "null", 4)
            return self.end_value(end, length)
        kind = json_whole(self.buf.p + a, b - a, &self.out)
        if self.syntax == X_DSML:
            as_json = kind != 0
        elif kind == T_STRING:
            as_json = self.syntax == X_GLM and not self.types & (T_STRING | T_ANY | T_UNDECLARED)
        elif self.types & T_STRING:
            as_json = (kind & self.types) != 0
        else:
            as_json = kind != 0
        if as_json:
            return self.end_value(end, length)
        self.out.n = mark
        self.pos = self.mark
        self.untyped = False
        self.begin_string()
        self.verbatim = self.syntax == X_DSML
        return 1

    # ---- the end ------------------------------------------------------------------------------------------------

    cdef int end(self, str cause) except -1:
        cdef Py_ssize_t n = self.buf.n
        cdef Py_ssize_t keep
        cdef Py_ssize_t end = n
        cdef bint cut = cause != "eos"
        if self.state == S_BLOCK:
            if self.sub == B_BEHIND and (self.pos == n or not self.candidate):
                self.complete(b"")
            elif self.candidate:
                self.not_a_call(n)
                self.run()
                if self.state == S_BLOCK:
                    self.end_block(cut)
            else:
                self.end_block(cut)
        if self.state == S_START or self.state == S_REASON:
            if self.trim:
                while end > self.sent and self.buf.p[end - 1] == c"\n":
                    end -= 1
            self.send_last(REASONING, end)
        elif self.state == S_TEXT or self.state == S_GUARD or self.state == S_PLAIN:
            keep = n
            if cut and self.state == S_TEXT and n - self.pos >= 5:
                # A start tag that the limit cut is no text; anything shorter may well be.
                keep = self.before_space(self.pos)
                self.cut = PyBytes_FromStringAndSize(self.buf.p + keep, n - keep)
            self.send_last(CONTENT, keep)
            if self.bad_end >= 0 and self.error is None and self.spaces(self.bad_end, n):
                self.error = "invalid tool call"
        elif self.state == S_FAILED:
            self.send_last(CONTENT, n)
            if not self.closed and not cut:
                self.error = "unterminated tool call"
        return 0

    cdef bint spaces(self, Py_ssize_t a, Py_ssize_t b) noexcept:
        while a < b and space(self.buf.p[a]):
            a += 1
        return a == b

    cdef int end_block(self, bint cut) except -1:
        """The turn ends inside a block that is no candidate."""
        cdef Py_ssize_t n = self.buf.n
        if cut:
            self.cut = PyBytes_FromStringAndSize(self.buf.p + self.sent, n - self.sent)
        elif self.repair():
            return 0
        else:
            self.send_last(CONTENT, n)
            if self.ends_with_block_end():
                self.error = "invalid tool call"
            elif not self.spaces(self.inner_at, n):
                self.error = "unterminated tool call"
        self.flush()
        self.void_calls += self.n_calls - self.base
        self.drop_calls()
        self.state = S_DONE
        return 0

    cdef bint ends_with_block_end(self) noexcept:
        cdef const Tag *t = &DSML[self.spelling][K_BLOCK_END] if self.syntax == X_DSML else &CALL_END
        cdef Py_ssize_t k = self.buf.n
        while k > self.inner_at and space(self.buf.p[k - 1]):
            k -= 1
        return k - self.inner_at >= t.n and memcmp(self.buf.p + k - t.n, t.p, t.n) == 0

    cdef int repair(self) except -1:
        """Adds what only closes complete calls. 1 if the block is whole now."""
        cdef Py_ssize_t n = self.buf.n, k, tail = n - self.pos
        cdef Py_ssize_t length = 0
        cdef bytes wrapper
        if self.syntax == X_DSML:
            if self.sub != B_TOP or not self.done:
                return 0
            if tail and (tail < 2 or self.match_dsml(self.pos, self.spelling, K_BLOCK_END, &length) != PARTIAL):
                return 0
            wrapper = _SPELLED[self.spelling][K_BLOCK_END]
        elif self.syntax == X_QWEN and self.sub == Q_CLOSE:
            if tail and tail < 2:
                return 0
            wrapper = b"</tool_call>"
        elif self.syntax == X_QWEN and (self.sub == V_STR or self.sub == V_HELD) and self.declared:
            k = self.rfind_function_end()
            if k < self.mark:
                return 0
            self.buf.n = k
            if self.sub == V_HELD:
                self.decide_value(k, 0)
            if self.sub == V_STR:
                self.string_value()
                put(&self.out, c'"')
            self.buf.n = n
            self.end_call()
            self.block_end = n
            while space(self.buf.p[self.block_end - 1]):
                self.block_end -= 1
            self.complete(b"")
            return 1
        else:
            return 0
        self.block_end = self.pos
        self.complete(wrapper)
        return 1

    cdef Py_ssize_t rfind_function_end(self) noexcept:
        """Where `</function></tool_call>`, the last thing of the turn, begins; -1 if it is not there."""
        cdef const char *p = self.buf.p
        cdef Py_ssize_t k = self.buf.n
        cdef const Tag *t
        cdef int round
        for round in range(2):
            t = &CALL_END if round == 0 else &FUNCTION_END
            while k > self.mark and space(p[k - 1]):
                k -= 1
            if k - self.mark < t.n or memcmp(p + k - t.n, t.p, t.n) != 0:
                return -1
            k -= t.n
        return k


cdef str unescape(const char *p, Py_ssize_t n, const Tag *close):
    """Text of p[:n] with escaped close tags undone (a name: short)."""
    cdef str s = text_of(p, n)
    cdef str rest
    cdef Py_ssize_t i, k
    if "&" not in s:
        return s
    rest = text_of(close.p + 1, close.n - 1)
    out = []
    i = 0
    while i < len(s):
        k = i + 1
        while s.startswith("amp;", k):
            k += 4
        if s[i] == "&" and s.startswith("lt;", k) and s.startswith(rest, k + 3):
            out.append("<" if k == i + 1 else "&")
            i += 4 if k == i + 1 else 5
        else:
            out.append(s[i])
            i += 1
    return "".join(out)

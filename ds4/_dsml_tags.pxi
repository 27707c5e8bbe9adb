# The tags of all syntaxes, and the names of the states.

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

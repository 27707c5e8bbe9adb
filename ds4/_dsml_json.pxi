# Growing byte buffers, and JSON: escaping strings, checking and minifying values byte by byte (RFC 8259), and the
# types that a JSON schema declares.

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
    if n == 0:  # an empty buffer has no memory yet, and memcpy takes no null pointer
        return 0
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


# ---- values: checked and minified ------------------------------------------------------------------------------------


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


# ---- declared types --------------------------------------------------------------------------------------------------


_TYPE_BITS = {
    "string": T_STRING,
    "number": T_NUMBER,
    "integer": T_NUMBER,
    "boolean": T_BOOL,
    "null": T_NULL,
    "array": T_ARRAY,
    "object": T_OBJECT,
}


cdef enum:
    SCHEMA_DEPTH = 128  # combinators and references inside each other; deeper ones say nothing


cdef int meet(int a, int b):
    """What two schemas admit together; those that exclude each other say nothing."""
    if a & T_ANY:
        return b
    if b & T_ANY:
        return a
    return a & b or T_ANY


def _type_of_value(value):
    if isinstance(value, str):
        return T_STRING
    if isinstance(value, bool):
        return T_BOOL
    if value is None:
        return T_NULL
    if isinstance(value, (int, float)):
        return T_NUMBER
    return T_ARRAY if isinstance(value, list) else T_OBJECT


@cython.final
@cython.internal
cdef class Declared:
    """The types of a tool's parameters (JSON Schema 2020-12), with local references and combinators resolved.

    A reference is looked up in the schema of the parameters, then in what surrounds it, and its types are found once:
    so the work is bounded by the text, however often its parts refer to each other.
    """

    cdef list roots
    cdef dict known         # id of a schema that is referred to -> type bits; T_ANY while they are looked for
    cdef set visited        # ids of the schemas that were referred to and whose properties were taken
    cdef dict properties

    def __init__(self, list roots):
        self.roots = roots
        self.known = {}
        self.visited = set()
        self.properties = {}

    cdef object target(self, str reference):
        """The schema that `#` or `#/pointer` (RFC 6901, percent-encoded) names, None if there is none."""
        if reference == "#":
            return self.roots[0]
        if not reference.startswith("#/"):
            return None
        for schema in self.roots:
            for part in unquote(reference[2:]).split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(schema, dict):
                    schema = schema.get(part)
                elif isinstance(schema, list) and part.isdecimal() and len(part) < 6 and int(part) < len(schema):
                    schema = schema[int(part)]
                else:
                    schema = None
                    break
            if schema is not None:
                return schema
        return None

    cdef int types_of(self, object schema, int depth) except -1:
        """Bits of the types that a JSON schema admits; T_ANY where it does not say."""
        cdef int bits = T_ANY, some
        if not isinstance(schema, dict) or depth > SCHEMA_DEPTH:
            return T_ANY
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self.target(reference)
            known = self.known.get(id(target))
            if known is None:
                self.known[id(target)] = T_ANY
                known = self.known[id(target)] = self.types_of(target, depth + 1)
            bits = known
        names = schema.get("type")
        if isinstance(names, str):
            names = [names]
        if isinstance(names, list) and names:
            some = 0
            for name in names:
                some |= _TYPE_BITS.get(name, T_ANY) if isinstance(name, str) else T_ANY
            bits = meet(bits, some)
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                some = 0
                for branch in schema[word]:
                    some |= self.types_of(branch, depth + 1)
                bits = meet(bits, some)
        if isinstance(schema.get("allOf"), list):
            for branch in schema["allOf"]:
                bits = meet(bits, self.types_of(branch, depth + 1))
        values = schema.get("enum")
        if values is None and "const" in schema:
            values = [schema["const"]]
        if isinstance(values, list) and values:
            some = 0
            for value in values:
                some |= _type_of_value(value)
            bits = meet(bits, some)
        return bits

    cdef int take(self, object schema, int depth) except -1:
        """Adds the properties of an object's schema, of what it refers to and of what it is joined from."""
        if not isinstance(schema, dict) or depth > SCHEMA_DEPTH:
            return 0
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self.target(reference)
            if id(target) not in self.visited:
                self.visited.add(id(target))
                self.take(target, depth + 1)
        if isinstance(schema.get("allOf"), list):
            for branch in schema["allOf"]:
                self.take(branch, depth + 1)
        if isinstance(schema.get("properties"), dict):
            for name, value in schema["properties"].items():
                self.properties[name] = meet(self.properties.get(name, T_ANY), self.types_of(value, depth + 1))
        return 0


def _properties_of(text):
    """property name -> type bits, of a tool's schema or of its parameters' schema; {} if it is not readable."""
    cdef Declared declared
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    roots = [schema]
    for word in ("function", "parameters", "input_schema"):
        if isinstance(schema, dict) and isinstance(schema.get(word), dict) and "properties" not in schema:
            schema = schema[word]
            roots.insert(0, schema)
    declared = Declared(roots)
    declared.take(schema, 0)
    return declared.properties

# The grammar of a tool block: DSML, GLM, Qwen. One method per state; each returns 1 to go on, or 0 if it needs more
# input.


cdef class Block(Values):
    cdef int open_block(self, Py_ssize_t at, Py_ssize_t length, int spelling, bint candidate) except -1:
        cdef const char *p = self.buf.p
        self.raw_at = at
        if at - self.sent >= 2 and p[at - 1] == c"\n" and p[at - 2] == c"\n":
            self.raw_at = at - 2
        self.pos = self.inner_at = at + length
        self.spelling = spelling
        self.candidate = candidate
        self.bare = length == 0
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
            return self.not_a_call(self.pos)
        self.pos += length
        self.block_end = self.pos
        self.think_at = -1
        if self.candidate or self.syntax != X_DSML:
            self.sub = B_BEHIND
            return 1
        return self.complete(b"")

    # ---- DSML --------------------------------------------------------------------------------------------------------

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
                self.block_end = self.pos
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
        if s == B_TOP and self.bare and self.done:
            return self.complete(b"")
        return self.violate(self.pos, "unexpected text between the tags")

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
                    return self.violate(i, "tag without an end")
            elif p[i] == c"<":
                return self.violate(i, "tag without an end")
            elif p[i] == c">":
                break
            i += 1
        self.scan = i
        if i == self.buf.n:
            return 0
        name = self.attribute(b'name="', i)
        if name is None or (not name and self.sub == B_INVOKE_TAG):
            return self.violate(i, "invoke without name" if self.sub == B_INVOKE_TAG else "parameter without name")
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

    # ---- GLM and Qwen ------------------------------------------------------------------------------------------------

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
        return 0 if m == PARTIAL else self.violate(self.pos, "unexpected text between the tags")

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
            return 0 if m == PARTIAL or e == PARTIAL else self.violate(i, "unexpected tag in the function's name")
        while a < b and space(self.buf.p[a]):
            a += 1
        while b > a and space(self.buf.p[b - 1]):
            b -= 1
        # A line break in the name: prose that speaks of the tag.
        if a == b or memchr(self.buf.p + a, c"\n", b - a) != NULL:
            return self.violate(i, "missing function name")
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
                return self.violate(i, "tag without an end")
            i += 1
            self.steps += 1
        self.scan = i
        if i == self.buf.n:
            return 0
        if i == self.pos:
            return self.violate(i, "missing name of a function or parameter")
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

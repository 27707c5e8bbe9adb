# Values of arguments, from their open tag to their close tag, as JSON. Each state's method returns 1 to go on, or 0 if
# it needs more input.


cdef class Values(Turn):
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
                        return self.violate(i, "parameter value is not valid JSON")
                    return self.end_value(i, self.close_length(i))
                if m == NO:
                    m = self.thought(i)
                    if m == FULL:
                        return 1
                if m == PARTIAL:
                    break
            # Behind the first value everything is dropped: one brace too many is a common slip.
            if j.state != J_DONE and not json_step(j, p[i], &self.out):
                return self.violate(i, "parameter value is not valid JSON")
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

    # ---- leaving a block ---------------------------------------------------------------------------------------------

    cdef int drop_calls(self) except -1:
        del self.done[:]
        del self.held[:]
        self.call = None
        self.out.n = 0
        return 0

    cdef int violate(self, Py_ssize_t at, str detail) except -1:
        """The block breaks its grammar at `at`. Returns 1: the caller goes on in the new state."""
        if self.candidate:
            return self.not_a_call(at)
        self.detail = detail
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

# What every state works with: the buffer, what was sent of it, and where tags stand in it.


cdef class Turn:
    cdef int syntax, state, sub
    cdef bint tools, trim, guard, implicit
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
    cdef bint bare                     # begins with its first invoke
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
    cdef str error, detail
    cdef Result _result

    def __cinit__(self):
        self.buf.p = self.out.p = NULL
        self.buf.n = self.buf.cap = self.out.n = self.out.cap = 0

    def __dealloc__(self):
        PyMem_Free(self.buf.p)
        PyMem_Free(self.out.p)

    # ---- sending -----------------------------------------------------------------------------------------------------

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

    # ---- looking -----------------------------------------------------------------------------------------------------

    cdef int find_start(self, Py_ssize_t at, int *spelling, Py_ssize_t *length) noexcept:
        """Does a block start at `at`? The spelling and the length of its tag are set when FULL; length 0: a bare invoke."""
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
        if self.implicit and (self.state == S_TEXT or self.state == S_GUARD):
            for i in range(DSML_SPELLINGS - 1):
                m = match(p, n, &DSML[i][K_INVOKE])
                if m == FULL and n > DSML[i][K_INVOKE].n:
                    if p[DSML[i][K_INVOKE].n] == c">" or space(p[DSML[i][K_INVOKE].n]):
                        spelling[0] = i
                        length[0] = 0
                        return FULL
                elif m != NO:
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

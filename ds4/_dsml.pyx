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
from urllib.parse import unquote

cdef extern from "Python.h":
    str PyUnicode_DecodeUTF8Stateful(const char *s, Py_ssize_t n, const char *errors, Py_ssize_t *consumed)

include "_dsml_events.pxi"
include "_dsml_json.pxi"
include "_dsml_tags.pxi"
include "_dsml_turn.pxi"
include "_dsml_values.pxi"
include "_dsml_block.pxi"


@cython.final
cdef class Parser(Block):
    def __init__(self, str syntax not None, *, bint thinking=False, bint tools=False, schemas=(),
                 bint implicit_invoke=False):
        if syntax not in _SYNTAXES:
            raise ValueError(f"syntax: expected one of {', '.join(_SYNTAXES)}, got {syntax!r}")
        self.syntax = _SYNTAXES[syntax]
        if self.syntax == X_PLAIN and (thinking or tools):
            raise ValueError("syntax: 'raw' has neither thinking nor tools")
        if implicit_invoke and (self.syntax != X_DSML or not tools):
            raise ValueError(f"implicit_invoke: only with tools in a DeepSeek syntax, not {syntax!r}")
        self.implicit = implicit_invoke
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
        self.error = self.detail = None
        self._result = None
        if thinking:
            self.state = S_START
        elif self.trim:
            self.state = S_SKIP
        else:
            self.state = S_TEXT if tools else S_PLAIN

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
        r.detail = self.detail if self.error == "invalid tool call" else None
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

    # ---- text --------------------------------------------------------------------------------------------------------

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

    # ---- the end -----------------------------------------------------------------------------------------------------

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
                self.detail = "parameter or tag not closed before the end of the block"
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
            wrapper = b"" if self.bare else _SPELLED[self.spelling][K_BLOCK_END]
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
        if not self.bare:
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

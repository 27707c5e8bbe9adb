# Bodies of a conversation, each of which begins like the one before: only what follows is scanned and read. The common
# beginning costs one comparison.

cdef enum:
    MOST_BODIES = 64    # each is compared with a new one, most of them in their first bytes only
    KEPT = 5            # bytes that a byte of a body keeps alive: itself, and what was made of it at most


@cython.final
cdef class Bodies:
    # Latest last.
    cdef list tapes
    cdef int64_t most
    cdef int64_t held
    cdef int64_t shortest

    def __init__(self, int64_t max_bytes, int64_t shortest=16384):
        self.tapes = []
        self.most = max_bytes
        self.held = 0
        self.shortest = shortest

    def __len__(self):
        return len(self.tapes)

    @property
    def bytes_held(self):
        return self.held

    def parse(self, bytes body not None):
        cdef Tape tape, like
        cdef int64_t same = 0
        cdef Py_ssize_t i
        if PyBytes_GET_SIZE(body) < self.shortest:
            return parse(body)
        like = self.nearest(body, &same)
        tape = scan(body, like, same)
        tape.made = {}
        if like is not None:
            tape.before = like.made
            tape.same = same
        with cython.critical_section(self):
            # A conversation that went on: its former body is not needed.
            if like is not None and 2 * same >= like.t.size:
                for i in range(len(self.tapes)):
                    if self.tapes[i] is like:
                        self.drop(i)
                        break
            self.tapes.append(tape)
            self.held += cost_of(tape)
            while self.held > self.most or len(self.tapes) > MOST_BODIES:
                self.drop(0)
        return make_node(tape, 0)

    cdef Tape nearest(self, bytes body, int64_t* same):
        """The body that this one begins like, in at least half of the shortest; None without one."""
        cdef Tape tape, best = None
        cdef int64_t n
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(body)
        cdef int64_t size = PyBytes_GET_SIZE(body)
        same[0] = self.shortest // 2
        for tape in list(self.tapes):
            n = min(size, tape.t.size)
            # Most are no nearer than the best one: they differ where that one ends.
            if n <= same[0] or tape.t.body[same[0]] != p[same[0]]:
                continue
            with nogil:
                n = ds4_common_prefix(tape.t.body, p, n)
            if n > same[0]:
                same[0] = n
                best = tape
        return best

    cdef object drop(self, Py_ssize_t i):
        self.held -= cost_of(<Tape>self.tapes.pop(i))


cdef int64_t cost_of(Tape tape):
    return KEPT * tape.t.size + 8 * tape.t.capacity


cdef object made_before(Spans owner, Tape tape, int64_t at, int64_t end):
    """What `owner` made of this value in the body before, None: it was not there, or nothing was made of it."""
    cdef dict values
    # The same bytes up to behind the value: the same words, wherever they were scanned.
    if tape.before is None or end >= tape.same:
        return None
    values = tape.before.get(owner)
    return None if values is None else values.get(at)


cdef object note_made(Spans owner, Tape tape, int64_t at, object value):
    if tape.made is not None:
        values = tape.made.get(owner)
        if values is None:
            values = tape.made[owner] = {}
        values[at] = value

# A bell between threads (native/text/bell.h).

cdef extern from "../native/text/bell.h" nogil:
    ctypedef struct ds4_bell:
        pass
    bint ds4_bell_init(ds4_bell* b)
    void ds4_bell_free(ds4_bell* b)
    void ds4_bell_wait(ds4_bell* b, int64_t nanoseconds)
    bint ds4_bell_wait_briefly(ds4_bell* b, int64_t nanoseconds)
    void ds4_bell_back(ds4_bell* b)
    void ds4_bell_forget(ds4_bell* b)
    bint ds4_bell_up(ds4_bell* b)
    void ds4_bell_ring(ds4_bell* b)
    void ds4_bell_soon(ds4_bell* b)
    void ds4_bell_left(ds4_bell* b, int64_t nanoseconds)

cdef enum:
    STAYS_NS = 1_000_000        # on its core, after it was told
    HANDS_OVER_NS = 50_000      # several times what taking the interpreter takes
    BRIEFLY_NS = 300_000        # what waking a thread takes, and a little work


cdef class Bell:
    cdef ds4_bell bell
    cdef bint made

    def __cinit__(self):
        self.made = ds4_bell_init(&self.bell)
        if not self.made:
            raise MemoryError

    def __dealloc__(self):
        if self.made:
            ds4_bell_free(&self.bell)

    def wait(self):
        with nogil:
            ds4_bell_wait(&self.bell, STAYS_NS)
        ds4_bell_back(&self.bell)

    def wait_briefly(self):
        cdef bint rung
        with nogil:
            rung = ds4_bell_wait_briefly(&self.bell, BRIEFLY_NS)
        ds4_bell_back(&self.bell)
        return rung

    def forget(self):
        ds4_bell_forget(&self.bell)

    def ring(self):
        if not ds4_bell_up(&self.bell):
            ds4_bell_ring(&self.bell)
            return
        # The waiter must find the interpreter free, or it sleeps until it is told so.
        with nogil:
            ds4_bell_ring(&self.bell)
            ds4_bell_left(&self.bell, HANDS_OVER_NS)

    def soon(self):
        ds4_bell_soon(&self.bell)

// One thread waits, others ring. The one that waits may be told that a ring is near: it then stays on its core, which
// would else fall asleep and take some ten microseconds to wake. C, not C++.
//
//   rung   somebody has rung since the last wait ended
//   near   a ring is near: looked at before sleeping
//   up     the waiter is on its core and without the interpreter: from when it was told until its wait has ended
//
// A ring is never lost: the waiter looks at `rung` under the lock before it sleeps, and whoever rings takes the lock
// after setting it.
#ifndef DS4_TEXT_BELL_H_
#define DS4_TEXT_BELL_H_

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

typedef struct {
  atomic_bool rung, near, up;
  bool sleeps;  // under the lock
  pthread_mutex_t lock;
  pthread_cond_t changed;
} ds4_bell;

static inline bool ds4_bell_init(ds4_bell* b) {
  atomic_init(&b->rung, false);
  atomic_init(&b->near, false);
  atomic_init(&b->up, false);
  b->sleeps = false;
  if (pthread_mutex_init(&b->lock, NULL)) return false;
  if (!pthread_cond_init(&b->changed, NULL)) return true;
  pthread_mutex_destroy(&b->lock);
  return false;
}

static inline void ds4_bell_free(ds4_bell* b) {
  pthread_cond_destroy(&b->changed);
  pthread_mutex_destroy(&b->lock);
}

static inline int64_t ds4_bell_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Looks at `flag` until it has the value or the time is over; some ten looks to a reading of the clock.
static inline void ds4_bell_spin(atomic_bool* flag, bool value, int64_t nanoseconds) {
  const int64_t end = ds4_bell_now() + nanoseconds;
  do {
    for (int i = 0; i < 32; ++i) {
      if (atomic_load(flag) == value) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
  } while (ds4_bell_now() < end);
}

// Sleeps until somebody rings, but for `nanoseconds` after it was told that a ring is near. One waiter at a time.
// `ds4_bell_back` follows both waits, once the waiter has the interpreter again.
static inline void ds4_bell_wait(ds4_bell* b, int64_t nanoseconds) {
  while (!atomic_exchange(&b->rung, false)) {
    if (atomic_exchange(&b->near, false)) {
      atomic_store(&b->up, true);
      ds4_bell_spin(&b->rung, true, nanoseconds);
      if (!atomic_load(&b->rung)) atomic_store(&b->up, false);
      continue;
    }
    pthread_mutex_lock(&b->lock);
    b->sleeps = true;
    while (!atomic_load(&b->rung) && !atomic_load(&b->near)) pthread_cond_wait(&b->changed, &b->lock);
    b->sleeps = false;
    pthread_mutex_unlock(&b->lock);
  }
}

// Without sleep, at most `nanoseconds`. Whether somebody has rung.
static inline bool ds4_bell_wait_briefly(ds4_bell* b, int64_t nanoseconds) {
  atomic_store(&b->up, true);
  ds4_bell_spin(&b->rung, true, nanoseconds);
  return atomic_exchange(&b->rung, false);
}

static inline void ds4_bell_back(ds4_bell* b) {
  atomic_store(&b->up, false);
}

// What was rung until now does not count.
static inline void ds4_bell_forget(ds4_bell* b) {
  atomic_store(&b->rung, false);
}

// Any thread.
static inline void ds4_bell_ring(ds4_bell* b) {
  atomic_store(&b->rung, true);
  pthread_mutex_lock(&b->lock);
  pthread_cond_signal(&b->changed);
  pthread_mutex_unlock(&b->lock);
}

// Whether the waiter is on its core.
static inline bool ds4_bell_up(ds4_bell* b) {
  return atomic_load(&b->up);
}

// After a ring: gives the waiter the time to take the interpreter, which the caller has let go of.
static inline void ds4_bell_left(ds4_bell* b, int64_t nanoseconds) {
  ds4_bell_spin(&b->up, false, nanoseconds);
}

// Any thread. Nothing happens unless somebody sleeps.
static inline void ds4_bell_soon(ds4_bell* b) {
  pthread_mutex_lock(&b->lock);
  if (b->sleeps) {
    atomic_store(&b->near, true);
    pthread_cond_signal(&b->changed);
  }
  pthread_mutex_unlock(&b->lock);
}

#endif  // DS4_TEXT_BELL_H_

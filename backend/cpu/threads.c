/* Threads that wait for work: a product takes less time than it takes to wake a thread, so one that
   has finished looks for the next product for a moment before it sleeps. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include "threads.h"

/* Longer than between two products of one pass. */
#define LOOKING_NS 200000
#define LOOKS 64
#define LEFT 0xff /* at least MOST_PARTS */

static struct {
    compute_part compute;
    const void *given;
    /* The number of this work, and in the lowest bits of how many parts nobody has taken. */
    atomic_long ticket;
    atomic_long done; /* parts */
    atomic_long asleep; /* threads */
} work;

static pthread_mutex_t use = PTHREAD_MUTEX_INITIALIZER, rest = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static long started;

static long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Tell whether a number changes, or does not for a moment. */
static bool changes(atomic_long *number, long seen)
{
    const long end = now_ns() + LOOKING_NS;
    do
        for (long look = 0; look < LOOKS; look++)
            if (atomic_load(number) != seen)
                return true;
    while (now_ns() < end);
    return false;
}

static void sleep_until_changed(long seen)
{
    pthread_mutex_lock(&rest);
    atomic_fetch_add(&work.asleep, 1);
    while (atomic_load(&work.ticket) == seen)
        pthread_cond_wait(&wake, &rest);
    atomic_fetch_sub(&work.asleep, 1);
    pthread_mutex_unlock(&rest);
}

/* Compute a part that nobody has taken; false if there is none. The work stays until it is done. */
static bool take_part(void)
{
    for (long ticket = atomic_load(&work.ticket); ticket & LEFT;)
        if (atomic_compare_exchange_weak(&work.ticket, &ticket, ticket - 1)) {
            work.compute(work.given, (ticket & LEFT) - 1);
            atomic_fetch_add(&work.done, 1);
            return true;
        }
    return false;
}

static void *take_parts(void *unused)
{
    for (;;) {
        const long seen = atomic_load(&work.ticket);
        if (!take_part() && !changes(&work.ticket, seen))
            sleep_until_changed(seen);
    }
    return unused;
}

/* A process that is forked has none of the threads, nor their work. */
static void forget_threads(void)
{
    started = 0;
    atomic_store(&work.ticket, 0);
    atomic_store(&work.asleep, 0);
    pthread_mutex_init(&use, NULL);
    pthread_mutex_init(&rest, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start_threads(long wanted)
{
    static bool is_known;
    if (!is_known)
        is_known = !pthread_atfork(NULL, NULL, forget_threads);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; is_known && started < wanted; started++) {
        if (pthread_create(&thread, NULL, take_parts, NULL))
            break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void share_parts(compute_part compute, const void *given, long parts)
{
    /* Work of another caller goes on. */
    if (parts == 1 || pthread_mutex_trylock(&use)) {
        for (long part = 0; part < parts; part++)
            compute(given, part);
        return;
    }
    start_threads(parts - 1);
    work.compute = compute;
    work.given = given;
    atomic_store(&work.done, 0);
    atomic_store(&work.ticket, (atomic_load(&work.ticket) | LEFT) + 1 + parts);
    if (atomic_load(&work.asleep)) {
        pthread_mutex_lock(&rest);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&rest);
    }
    while (take_part())
        ;
    /* A thread that is not running has taken none, or is about to finish. */
    for (long done; (done = atomic_load(&work.done)) < parts;)
        if (!changes(&work.done, done))
            sched_yield();
    pthread_mutex_unlock(&use);
}

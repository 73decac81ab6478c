/* A loop whose parts are computed at once; `threads.c` has the threads. */

typedef void (*compute_part)(const void *given, long part);

#define MOST_PARTS 64

/* Compute each part from 0 to `parts` once, by as many threads, this one included. */
void share_parts(compute_part compute, const void *given, long parts);

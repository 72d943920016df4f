// A library to preload: the wall clock jumps to and fro by up to twelve hours. Other clocks are not changed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static long hours(void) {
  static long asked;
  return asked++ / 7 % 2 ? 6 : -6;
}

int clock_gettime(clockid_t which, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, out);
  if (which == CLOCK_REALTIME) out->tv_sec += 3600 * hours();
  return code;
}

int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

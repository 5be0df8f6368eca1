/* NVML's functions, of GPUs that a file describes: the library that Nvml loads where there is no GPU.
 *
 * FAKE_NVML names the file. Each of its lines is "NAME NUMBER" or "NAME.GPU NUMBER"; what it does not have is not
 * supported. Names: gpus, init (an error of nvmlInit), error (of every function), ecc, pending, failed, slowdown, width,
 * width_max, links (of 18), recoveries, register and wait (errors of these). Each "xid.GPU NUMBER" comes
 * once to a set of events, in its order.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static int xids_told;

/* Whether the file has the line; puts the number into *value. */
static int look(const char *name, int gpu, unsigned long long *value) {
  char wanted[64], found[64];
  unsigned long long number;
  int is_there = 0;
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  if (!file) return 0;
  snprintf(wanted, sizeof wanted, gpu < 0 ? "%s" : "%s.%d", name, gpu);
  while (fscanf(file, "%63s %llu", found, &number) == 2)
    if (!strcmp(found, wanted)) *value = number, is_there = 1;
  fclose(file);
  return is_there;
}

static int gpu_of(void *device) { return (int)((char *)device - (char *)0x1000); }

static int error_of(void *device) {
  unsigned long long code = 0;
  look("error", gpu_of(device), &code);
  return (int)code;
}

static int large(void *device, const char *name, unsigned long long *value) {
  int code = error_of(device);
  return code ? code : look(name, gpu_of(device), value) ? 0 : 3;
}

static int small(void *device, const char *name, unsigned *value) {
  unsigned long long found = 0;
  int code = large(device, name, &found);
  if (!code) *value = (unsigned)found;
  return code;
}

API int nvmlInit_v2(void) {
  unsigned long long code = 0;
  look("init", -1, &code);
  return (int)code;
}
API int nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(int code) {
  return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : "Unknown Error";
}
API int nvmlDeviceGetCount_v2(unsigned *count) {
  unsigned long long found = 0;
  look("gpus", -1, &found);
  *count = (unsigned)found;
  return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  unsigned long long code = 0;
  *device = (char *)0x1000 + index;
  look("handle", (int)index, &code);
  return (int)code;
}
API int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
  return type == 1 && counter == 0 ? large(device, "ecc", count) : 2;
}
#ifndef OLD_DRIVER
API int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *corrected = *uncorrected = 0;
  int code = small(device, "pending", pending);
  return code ? code : small(device, "failed", failed);
}
#endif
API int nvmlDeviceGetRetiredPagesPendingStatus(void *device, int *pending) {
  return small(device, "retired", (unsigned *)pending);
}
API int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
  return large(device, "slowdown", reasons);
}
API int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *width) { return small(device, "width", width); }
API int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *width) { return small(device, "width_max", width); }
API int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *is_active) {
  unsigned up = 0;
  int code = small(device, "links", &up);
  if (!code && link >= 18) return 2;
  *is_active = link < up;
  return code;
}
API int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, int counter, unsigned long long *value) {
  return link == 0 && counter == 1 ? large(device, "recoveries", value) : 3;
}
API int nvmlEventSetCreate(void **set) { return xids_told = 0, *set = &xids_told, 0; }
API int nvmlEventSetFree(void *set) { return set == &xids_told ? 0 : 2; }
API int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
  unsigned long long code = 0;
  if (types != 8 || set != &xids_told) return 2;
  look("register", gpu_of(device), &code);
  return code ? (int)code : error_of(device);
}

struct event { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };

API int nvmlEventSetWait_v2(void *set, struct event *event, unsigned milliseconds) {
  char found[64];
  unsigned long long number, code = 0;
  int seen = 0;
  if (look("wait", -1, &code)) return (int)code;
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  while (file && fscanf(file, "%63s %llu", found, &number) == 2)
    if (!strncmp(found, "xid.", 4) && seen++ == xids_told) {
      fclose(file);
      xids_told++;
      *event = (struct event){(char *)0x1000 + atoi(found + 4), 8, number, ~0u, ~0u};
      return 0;
    }
  if (file) fclose(file);
  return 10;
}

/* Appends a line to the file UMA_TEST_PIPELINES for each compute pipeline that a program creates: the milliseconds
 * that the driver took, or the name that ggml gives it afterwards (with GGML_VK_DEBUG_MARKERS).  To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*function)(void);
typedef function (*get_address)(void *, const char *);
typedef int (*create)(void *, uint64_t, uint32_t, const void *, const void *, uint64_t *);
typedef struct { int type; const void *next; int object; uint64_t handle; const char *name; } name_info;
typedef int (*set_name)(void *, const name_info *);

enum { PIPELINE = 19 };

static get_address next_of_device;
static create next_create;
static set_name next_name;

static void note(const char *what, const char *text) {
  const char *path = getenv("UMA_TEST_PIPELINES");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) { fprintf(file, "%s %s\n", what, text); fclose(file); }
}

static int create_pipelines(void *device, uint64_t cache, uint32_t n, const void *infos, const void *allocator, uint64_t *made) {
  struct timespec began, ended;
  char took[32];
  clock_gettime(CLOCK_MONOTONIC, &began);
  int result = next_create(device, cache, n, infos, allocator, made);
  clock_gettime(CLOCK_MONOTONIC, &ended);
  snprintf(took, sizeof took, "%.1f", 1e3 * (ended.tv_sec - began.tv_sec) + 1e-6 * (ended.tv_nsec - began.tv_nsec));
  note("created", took);
  return result;
}

static int set_object_name(void *device, const name_info *info) {
  if (info->object == PIPELINE) note("named", info->name);
  return next_name(device, info);
}

static function ours(const char *name, function found) {
  if (found && !strcmp(name, "vkCreateComputePipelines")) { next_create = (create)found; return (function)create_pipelines; }
  if (found && !strcmp(name, "vkSetDebugUtilsObjectNameEXT")) { next_name = (set_name)found; return (function)set_object_name; }
  return found;
}

static function of_device(void *device, const char *name) { return ours(name, next_of_device(device, name)); }

function vkGetInstanceProcAddr(void *instance, const char *name) {
  static get_address next;
  if (!next) next = (get_address)dlsym(dlopen("libvulkan.so.1", RTLD_LAZY), "vkGetInstanceProcAddr");
  function found = next(instance, name);
  if (found && !strcmp(name, "vkGetDeviceProcAddr")) { next_of_device = (get_address)found; return (function)of_device; }
  return ours(name, found);
}

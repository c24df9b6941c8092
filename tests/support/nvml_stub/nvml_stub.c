/* A stand-in for libnvidia-ml.so.1, enough for nvidia-ml-py (and for programs that only count and name GPUs).
 *
 * The file named by SGPU_TEST_NVML says what there is, one fact a line, fields separated by tabs:
 *
 *   fail    FUNCTION  CODE                                  the function answers with this error
 *   gpu     UUID  NAME  BUS  TOTAL  USED  RESERVED  UTIL  MIG  ERROR
 *   slice   UUID  NAME  TOTAL  USED                         a MIG slice of the last gpu
 *   process PID  BYTES                                      on the last gpu or slice
 *   power   MILLIWATTS                                      of the last gpu or slice; "not supported" without
 *   heat    DEGREES                                         of the last gpu; "not supported" without
 *   uses                                                    the last gpu tells how much its processes use it
 *   use     PID  PERCENT                                    one of them
 *   block   FUNCTION  UUID                                  asked of this device the function does not return
 *   link    UUID  UUID  LEVEL  NVLINK                       two gpus' common ancestor, and 1 for NVLink
 *
 * Sizes are bytes. UTIL is 0 to 100, -1 for "not supported". MIG is 0 or 1, -1 for "not supported". ERROR is
 * what asking for the handle, and any question about what the device does now, answers. The file is read again by
 * every nvmlInit, every search for a UUID and every such question, so a test may replace it: a blocked call returns
 * when the file says no more that it blocks. How often a process has NVML open stands in a file beside it, named like
 * it with .PID.open after that.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
};

enum { MAX_GPUS = 16, MAX_SLICES = 8, MAX_PROCESSES = 32, MAX_FAILURES = 16, MAX_LINKS = 128, POLL_US = 20000, TEXT = 96 };

typedef unsigned long long u64;

typedef struct {
    int is_slice;
    char uuid[TEXT];
    char name[TEXT];
    u64 total, used, reserved;
    int utilization, power, heat, error;
    int process_count, use_count, tells_uses;
    struct { unsigned pid, percent; } uses[MAX_PROCESSES];
    struct { unsigned pid; u64 bytes; } processes[MAX_PROCESSES];
} Unit;

typedef struct {
    Unit unit; /* first, so that a handle is a Unit in any case */
    unsigned bus;
    int mig, slice_count;
    Unit slices[MAX_SLICES];
} Gpu;

static Gpu gpus[MAX_GPUS];
static int gpu_count;
static struct { char function[TEXT]; int code; } failures[MAX_FAILURES];
static int failure_count;
static struct { char function[TEXT]; char uuid[TEXT]; } blocks[MAX_FAILURES];
static int block_count;
static struct { char uuids[2][TEXT]; int level, nvlink; } links[MAX_LINKS];
static int link_count;
static int initialised;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int lock(void)
{
    return pthread_mutex_lock(&mutex);
}

static void unlock(int *ignored)
{
    (void)ignored;
    pthread_mutex_unlock(&mutex);
}

/* until the function returns: several threads of a process may ask at a time */
#define LOCKED __attribute__((cleanup(unlock), unused)) int guard = lock()

static int load(void)
{
    const char *path = getenv("SGPU_TEST_NVML");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file)
        return DRIVER_NOT_LOADED;
    char line[512];
    Unit *last = NULL;
    gpu_count = failure_count = block_count = link_count = 0;
    while (fgets(line, sizeof line, file)) {
        Gpu gpu = {.unit = {.power = -1, .heat = -1}};
        Unit slice = {.is_slice = 1, .utilization = -1, .power = -1, .heat = -1};
        unsigned pid, percent;
        u64 bytes;
        if (failure_count < MAX_FAILURES &&
            sscanf(line, "fail\t%95[^\t]\t%d", failures[failure_count].function, &failures[failure_count].code) == 2) {
            failure_count++;
        } else if (block_count < MAX_FAILURES &&
                   sscanf(line, "block\t%95[^\t]\t%95[^\t\n]", blocks[block_count].function, blocks[block_count].uuid) == 2) {
            block_count++;
        } else if (link_count < MAX_LINKS &&
                   sscanf(line, "link\t%95[^\t]\t%95[^\t]\t%d\t%d", links[link_count].uuids[0],
                          links[link_count].uuids[1], &links[link_count].level, &links[link_count].nvlink) == 4) {
            link_count++;
        } else if (last && sscanf(line, "power\t%d", &last->power) == 1) {
        } else if (last && sscanf(line, "heat\t%d", &last->heat) == 1) {
        } else if (last && !strcmp(line, "uses\n")) {
            last->tells_uses = 1;
        } else if (last && last->use_count < MAX_PROCESSES && sscanf(line, "use\t%u\t%u", &pid, &percent) == 2) {
            last->uses[last->use_count].pid = pid;
            last->uses[last->use_count++].percent = percent;
        } else if (gpu_count < MAX_GPUS &&
                   sscanf(line, "gpu\t%95[^\t]\t%95[^\t]\t%u\t%llu\t%llu\t%llu\t%d\t%d\t%d", gpu.unit.uuid, gpu.unit.name,
                          &gpu.bus, &gpu.unit.total, &gpu.unit.used, &gpu.unit.reserved, &gpu.unit.utilization, &gpu.mig,
                          &gpu.unit.error) == 9) {
            gpus[gpu_count] = gpu;
            last = &gpus[gpu_count++].unit;
        } else if (gpu_count && gpus[gpu_count - 1].slice_count < MAX_SLICES &&
                   sscanf(line, "slice\t%95[^\t]\t%95[^\t]\t%llu\t%llu", slice.uuid, slice.name, &slice.total, &slice.used) == 4) {
            Gpu *parent = &gpus[gpu_count - 1];
            last = &parent->slices[parent->slice_count++];
            *last = slice;
        } else if (last && last->process_count < MAX_PROCESSES && sscanf(line, "process\t%u\t%llu", &pid, &bytes) == 2) {
            last->processes[last->process_count].pid = pid;
            last->processes[last->process_count++].bytes = bytes;
        } else if (line[0] != '\n') {
            fprintf(stderr, "nvml_stub: not understood in %s: %s", path, line);
            abort();
        }
    }
    fclose(file);
    return OK;
}

static int failure(const char *function)
{
    for (int i = 0; i < failure_count; i++)
        if (!strcmp(failures[i].function, function))
            return failures[i].code;
    return initialised ? OK : UNINITIALIZED;
}

#define FAIL_AS_TOLD                     \
    LOCKED;                              \
    do {                                 \
        int code = failure(__func__);    \
        if (code)                        \
            return code;                 \
    } while (0)

static int blocked(const char *function, const char *uuid)
{
    load();
    for (int i = 0; i < block_count; i++)
        if (!strcmp(blocks[i].function, function) && !strcmp(blocks[i].uuid, uuid))
            return 1;
    return 0;
}

/* begins every question about what a device does now */
#define ASK(unit)                                 \
    FAIL_AS_TOLD;                                 \
    while (blocked(__func__, (unit)->uuid)) {     \
        pthread_mutex_unlock(&mutex);             \
        usleep(POLL_US);                          \
        pthread_mutex_lock(&mutex);               \
    }                                             \
    if ((unit)->error)                            \
        return (unit)->error

static void tell_open(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s.%d.open", getenv("SGPU_TEST_NVML"), (int)getpid());
    FILE *file = fopen(path, "we");
    if (file) {
        fprintf(file, "%d\n", initialised);
        fclose(file);
    }
}

static int copy(char *to, unsigned size, const char *text)
{
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

/* ---- the library */

int nvmlInitWithFlags(unsigned flags)
{
    LOCKED;
    (void)flags;
    int code = load();
    if (code)
        return code;
    initialised++;
    code = failure(__func__);
    if (code)
        initialised--;
    tell_open();
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    FAIL_AS_TOLD;
    initialised--;
    tell_open();
    return OK;
}

const char *nvmlErrorString(int code)
{
    return code == OK ? "Success" : "an error of the stub";
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    FAIL_AS_TOLD;
    return copy(version, size, "999.0");
}

/* ---- GPUs */

int nvmlDeviceGetCount_v2(unsigned *count)
{
    FAIL_AS_TOLD;
    *count = (unsigned)gpu_count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Unit **handle)
{
    FAIL_AS_TOLD;
    if (index >= (unsigned)gpu_count)
        return INVALID_ARGUMENT;
    *handle = &gpus[index].unit;
    return gpus[index].unit.error;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Unit **handle)
{
    FAIL_AS_TOLD;
    load();
    for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(gpus[i].unit.uuid, uuid)) {
            *handle = &gpus[i].unit;
            return gpus[i].unit.error;
        }
        for (int j = 0; j < gpus[i].slice_count; j++)
            if (!strcmp(gpus[i].slices[j].uuid, uuid)) {
                *handle = &gpus[i].slices[j];
                return OK;
            }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Unit *unit, char *name, unsigned size)
{
    FAIL_AS_TOLD;
    return copy(name, size, unit->name);
}

int nvmlDeviceGetUUID(Unit *unit, char *uuid, unsigned size)
{
    FAIL_AS_TOLD;
    return copy(uuid, size, unit->uuid);
}

int nvmlDeviceGetMinorNumber(Unit *unit, unsigned *number)
{
    FAIL_AS_TOLD;
    *number = (unsigned)((Gpu *)unit - gpus);
    return OK;
}

static int link_of(Unit *one, Unit *other)
{
    for (int i = 0; i < link_count; i++)
        for (int j = 0; j < 2; j++)
            if (!strcmp(links[i].uuids[j], one->uuid) && !strcmp(links[i].uuids[1 - j], other->uuid))
                return i;
    return -1;
}

int nvmlDeviceGetTopologyCommonAncestor(Unit *one, Unit *other, int *level)
{
    FAIL_AS_TOLD;
    int found = link_of(one, other);
    if (found < 0)
        return NOT_SUPPORTED;
    *level = links[found].level;
    return OK;
}

int nvmlDeviceGetP2PStatus(Unit *one, Unit *other, int kind, int *status)
{
    FAIL_AS_TOLD;
    int found = link_of(one, other);
    if (found < 0)
        return NOT_SUPPORTED;
    *status = kind == 2 && links[found].nvlink ? 0 : 5; /* NVML_P2P_CAPS_INDEX_NVLINK; not supported */
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char text[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Unit *unit, PciInfo *info)
{
    FAIL_AS_TOLD;
    if (unit->is_slice)
        return NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->bus = ((Gpu *)unit)->bus;
    snprintf(info->legacy, sizeof info->legacy, "0000:%02X:00.0", info->bus & 0xff);
    snprintf(info->text, sizeof info->text, "00000000:%02X:00.0", info->bus & 0xff);
    return OK;
}

/* ---- what they do now */

typedef struct {
    u64 total, free, used;
} Memory;

int nvmlDeviceGetMemoryInfo(Unit *unit, Memory *memory)
{
    ASK(unit);
    memory->total = unit->total;
    memory->used = unit->used + unit->reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

typedef struct {
    unsigned version;
    u64 total, reserved, free, used;
} MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(Unit *unit, MemoryV2 *memory)
{
    ASK(unit);
    memory->total = unit->total;
    memory->reserved = unit->reserved;
    memory->used = unit->used;
    memory->free = unit->total - unit->used - unit->reserved;
    return OK;
}

typedef struct {
    unsigned gpu, memory;
} Rates;

int nvmlDeviceGetUtilizationRates(Unit *unit, Rates *rates)
{
    ASK(unit);
    if (unit->utilization < 0)
        return NOT_SUPPORTED;
    rates->gpu = (unsigned)unit->utilization;
    rates->memory = 0;
    return OK;
}

int nvmlDeviceGetPowerUsage(Unit *unit, unsigned *milliwatts)
{
    ASK(unit);
    if (unit->power < 0)
        return NOT_SUPPORTED;
    *milliwatts = (unsigned)unit->power;
    return OK;
}

int nvmlDeviceGetTemperature(Unit *unit, int sensor, unsigned *degrees)
{
    ASK(unit);
    if (unit->heat < 0 || sensor)
        return NOT_SUPPORTED;
    *degrees = (unsigned)unit->heat;
    return OK;
}

typedef struct {
    unsigned pid;
    u64 at_us;
    unsigned gpu, memory, encoder, decoder;
} Use;

int nvmlDeviceGetProcessUtilization(Unit *unit, Use *out, unsigned *count, u64 since_us)
{
    ASK(unit);
    unsigned room = *count;
    struct timeval now;
    if (!unit->tells_uses)
        return NOT_SUPPORTED;
    if (!unit->use_count)
        return NOT_FOUND;
    *count = (unsigned)unit->use_count;
    if (!out || room < *count)
        return INSUFFICIENT_SIZE;
    gettimeofday(&now, NULL);
    u64 now_us = (u64)now.tv_sec * 1000000 + (u64)now.tv_usec;
    if (now_us <= since_us)
        return NOT_FOUND;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (Use){unit->uses[i].pid, now_us, unit->uses[i].percent, 0, 0, 0};
    return OK;
}

typedef struct {
    unsigned pid;
    u64 bytes;
    unsigned gpu_instance, compute_instance;
} Process;

static int processes_of(const Unit *unit, unsigned *count, Process *out)
{
    unsigned room = *count;
    *count = (unsigned)unit->process_count;
    if (room < *count)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (Process){unit->processes[i].pid, unit->processes[i].bytes, 0xFFFFFFFF, 0xFFFFFFFF};
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Unit *unit, unsigned *count, Process *out)
{
    ASK(unit);
    return processes_of(unit, count, out);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Unit *unit, unsigned *count, Process *out)
{
    ASK(unit);
    return processes_of(unit, count, out);
}

/* ---- MIG */

int nvmlDeviceGetMigMode(Unit *unit, unsigned *current, unsigned *pending)
{
    FAIL_AS_TOLD;
    if (unit->is_slice)
        return INVALID_ARGUMENT;
    if (((Gpu *)unit)->mig < 0)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned)((Gpu *)unit)->mig;
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(Unit *unit, unsigned *is_mig)
{
    FAIL_AS_TOLD;
    *is_mig = (unsigned)unit->is_slice;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Unit *unit, unsigned *count)
{
    FAIL_AS_TOLD;
    *count = unit->is_slice ? 0 : 2 * MAX_SLICES;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Unit *unit, unsigned index, Unit **handle)
{
    FAIL_AS_TOLD;
    /* only every second place is taken, as where slices were made and removed again */
    if (unit->is_slice || index % 2 || index / 2 >= (unsigned)((Gpu *)unit)->slice_count)
        return NOT_FOUND;
    *handle = &((Gpu *)unit)->slices[index / 2];
    return OK;
}

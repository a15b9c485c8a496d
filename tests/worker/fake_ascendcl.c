/* A stand-in for libascendcl: its virtual memory over the host's, every call checked.
 *
 * Types, constants and codes are those of acl_rt.h and rt_error_codes.h. Functions that begin with fake_ are the tests'
 * own. New memory holds 0xA5 in every byte. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int aclError;
typedef void *aclrtDrvMemHandle;
typedef enum { ACL_MEM_HANDLE_TYPE_NONE = 0 } aclrtMemHandleType;
typedef enum { ACL_MEM_ALLOCATION_TYPE_PINNED = 0 } aclrtMemAllocationType;
typedef enum { ACL_MEM_LOCATION_TYPE_HOST = 0, ACL_MEM_LOCATION_TYPE_DEVICE } aclrtMemLocationType;
typedef enum {
    ACL_DDR_MEM, ACL_HBM_MEM, ACL_DDR_MEM_HUGE, ACL_DDR_MEM_NORMAL, ACL_HBM_MEM_HUGE, ACL_HBM_MEM_NORMAL
} aclrtMemAttr;
typedef enum {
    ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED
} aclrtMemGranularityOptions;
typedef struct { uint32_t id; aclrtMemLocationType type; } aclrtMemLocation;
typedef struct {
    aclrtMemHandleType handleType;
    aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
} aclrtPhysicalMemProp;

enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_DRV_INTERNAL_ERROR = 507899
};
enum { GRANULARITY = 64 << 10, DEVICE = 3, MAX_ENTRIES = 512 };

typedef struct { uint64_t address, size, handle; } entry_t; /* size 0: free */
static entry_t reserved[MAX_ENTRIES], mapped[MAX_ENTRIES], handles[MAX_ENTRIES]; /* of handles, address is the file */
static uint64_t total_bytes, free_bytes, next_handle = 1;
static int busy, fail_after = -1;
static char fail_name[64];

static entry_t *find(entry_t *table, uint64_t address) {
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (table[i].size && table[i].address == address) return &table[i];
    return NULL;
}

static entry_t *find_handle(entry_t *table, aclrtDrvMemHandle handle) {
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (table[i].size && table[i].handle == (uint64_t)(uintptr_t)handle) return &table[i];
    return NULL;
}

static entry_t *empty(entry_t *table) {
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (!table[i].size) return &table[i];
    return NULL;
}

static int fails(const char *name) {
    if (fail_after < 0 || strcmp(name, fail_name)) return 0;
    return fail_after-- == 0;
}

static int is_ours(const aclrtPhysicalMemProp *prop) {
    return prop && prop->handleType == ACL_MEM_HANDLE_TYPE_NONE && prop->allocationType == ACL_MEM_ALLOCATION_TYPE_PINNED
        && prop->memAttr == ACL_HBM_MEM_HUGE && prop->location.id == DEVICE
        && prop->location.type == ACL_MEM_LOCATION_TYPE_DEVICE && prop->reserve == 0;
}

#define CHECK(ok) do { if (!(ok)) return ACL_ERROR_RT_PARAM_INVALID; } while (0)
#define MAY_FAIL() do { if (fails(__func__)) return ACL_ERROR_RT_DRV_INTERNAL_ERROR; } while (0)

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option, size_t *out) {
    MAY_FAIL();
    CHECK(is_ours(prop) && option == ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED && out);
    *out = GRANULARITY;
    return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected, uint64_t flags) {
    MAY_FAIL();
    entry_t *entry = empty(reserved);
    CHECK(out && entry && size && size % GRANULARITY == 0 && alignment == 0 && expected == NULL && flags == 0);
    void *address = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(address != MAP_FAILED);
    *entry = (entry_t){(uintptr_t)address, size, 0};
    *out = address;
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *address) {
    MAY_FAIL();
    entry_t *entry = find(reserved, (uintptr_t)address);
    CHECK(entry);
    for (int i = 0; i < MAX_ENTRIES; i++)
        CHECK(!mapped[i].size || mapped[i].address < entry->address || mapped[i].address >= entry->address + entry->size);
    munmap(address, entry->size);
    entry->size = 0;
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *out, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags) {
    MAY_FAIL();
    entry_t *entry = empty(handles);
    CHECK(out && entry && size && size % GRANULARITY == 0 && is_ours(prop) && flags == 0);
    if (size > free_bytes) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    int file = memfd_create("physical memory", MFD_CLOEXEC);
    CHECK(file >= 0);
    static char dirt[GRANULARITY];
    memset(dirt, 0xA5, sizeof dirt);
    for (size_t done = 0; done < size; done += sizeof dirt) CHECK(write(file, dirt, sizeof dirt) == sizeof dirt);
    free_bytes -= size;
    *entry = (entry_t){(uint64_t)file, size, next_handle++};
    *out = (aclrtDrvMemHandle)(uintptr_t)entry->handle;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    MAY_FAIL();
    entry_t *entry = find_handle(handles, handle);
    CHECK(entry && !find_handle(mapped, handle));
    close((int)entry->address);
    free_bytes += entry->size;
    entry->size = 0;
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    MAY_FAIL();
    uint64_t at = (uintptr_t)address;
    entry_t *memory = find_handle(handles, handle), *entry = empty(mapped);
    CHECK(memory && entry && !find_handle(mapped, handle) && memory->size == size && offset == 0 && flags == 0);
    int is_reserved = 0;
    for (int i = 0; i < MAX_ENTRIES; i++) {
        entry_t *range = &reserved[i], *other = &mapped[i];
        is_reserved |= range->size && range->address <= at && at + size <= range->address + range->size;
        CHECK(!other->size || at + size <= other->address || other->address + other->size <= at);
    }
    CHECK(is_reserved);
    CHECK(mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)memory->address, 0) == address);
    *entry = (entry_t){at, size, memory->handle};
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *address) {
    MAY_FAIL();
    entry_t *entry = find(mapped, (uintptr_t)address);
    CHECK(entry && !busy);
    mmap(address, entry->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    entry->size = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free, size_t *total) {
    CHECK(attribute == ACL_HBM_MEM && free && total);
    *free = free_bytes;
    *total = total_bytes;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice(void) {
    MAY_FAIL();
    busy = 0;
    return ACL_SUCCESS;
}

void fake_start(uint64_t size) {
    total_bytes = free_bytes = size;
    busy = 0;
    fail_after = -1;
}

/* The call of that name fails after so many more. */
void fake_fail(const char *name, int after) {
    strncpy(fail_name, name, sizeof fail_name - 1);
    fail_after = after;
}

void fake_launch(void) { busy = 1; }

uint64_t fake_free_bytes(void) { return free_bytes; }

/* The entries in use of 'r'eserved, 'm'apped or 'h'andles, three numbers each; -> how many. */
int fake_entries(char which, uint64_t *out) {
    entry_t *table = which == 'r' ? reserved : which == 'm' ? mapped : handles;
    int count = 0;
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (table[i].size) memcpy(out + 3 * count++, &table[i], sizeof(entry_t));
    return count;
}

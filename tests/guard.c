/* For tests/soak.py, by LD_PRELOAD. What posix_memalign gives, which is where torch's tensors live, ends at a page that nobody
   may touch, and once freed is not to be touched for ever. A read or write after free or past the end is a SIGSEGV where it
   happens, and EFAULT in a system call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define ARENA (1ul << 38)

static char *arena;
static _Atomic size_t used;
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);

__attribute__((constructor)) static void start(void) {
    real_free = dlsym(RTLD_NEXT, "free");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    char *at = mmap(0, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) arena = at;
}

/* [a page with its size and number of pages] [its pages, the data at their end] [a page that stays PROT_NONE] */
int posix_memalign(void **out, size_t align, size_t size) {
    if (align < sizeof(void *)) align = sizeof(void *);
    size_t bytes = (size + align - 1) / align * align, pages = (bytes + PAGE - 1) / PAGE + 1;
    size_t at = atomic_fetch_add(&used, (pages + 1) * PAGE);
    if (!arena || align > PAGE || at + (pages + 1) * PAGE > ARENA) return ENOMEM;
    char *block = arena + at;
    if (mprotect(block, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    ((size_t *)block)[0] = size;
    ((size_t *)block)[1] = pages;
    *out = block + pages * PAGE - bytes;
    memset(*out, 0xff, bytes); /* NaN, if read as it is */
    return 0;
}

static int guarded(void *p) { return arena && (char *)p >= arena && (char *)p < arena + ARENA; }

static char *block_of(void *p) { return (char *)((uintptr_t)p & ~(PAGE - 1)) - PAGE; }

void free(void *p) {
    if (!guarded(p)) {
        if (real_free) real_free(p);
        return;
    }
    int kept = errno;
    char *block = block_of(p);
    size_t bytes = ((size_t *)block)[1] * PAGE;
    madvise(block, bytes, MADV_DONTNEED);
    if (mprotect(block, bytes, PROT_NONE)) abort();
    errno = kept;
}

void *realloc(void *p, size_t size) {
    if (!guarded(p)) return real_realloc(p, size);
    size_t before = ((size_t *)block_of(p))[0];
    void *out = malloc(size);
    if (out) memcpy(out, p, before < size ? before : size);
    free(p);
    return out;
}

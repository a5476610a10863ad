// A plugin of QEMU 7.2 that counts the accesses of an emulated node to fast and to slow memory.
//   qemu-system-x86_64 … -plugin tier_accesses.so,counts=FILE
// FILE is shared memory in the layout of struct Counts; while its `enabled` is 0, nothing is counted.
// Emulation has no caches, so each processor gets one of 1 MiB, direct-mapped: what misses it would reach the
// memory. Build: cc -shared -fPIC -O2 tier_accesses.c -o tier_accesses.so

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// What is used of qemu-plugin.h, which Debian does not package.
typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_hwaddr;
typedef void (*translated_cb)(qemu_plugin_id_t, struct qemu_plugin_tb*);
typedef void (*memory_cb)(unsigned, qemu_plugin_meminfo_t, uint64_t, void*);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translated_cb);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn*, memory_cb, int flags, int rw, void*);
struct qemu_plugin_hwaddr* qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t, uint64_t);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr*);
uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr*);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

enum { kProcessors = 8, kLines = 1 << 14, kLineBits = 6 };

struct Counts {
  volatile uint64_t enabled;
  // The slow memory, by QEMU's own offsets (`info ramblock`).
  volatile uint64_t slow_begin;
  volatile uint64_t slow_end;
  // Per processor, by programs (0) and the kernel (1), to fast (0) and slow (1) memory.
  uint64_t accesses[kProcessors][2][2];
  uint64_t misses[kProcessors][2][2];
};

static struct Counts* counts;
static uint64_t cached[kProcessors][kLines];

static void Accessed(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void* data) {
  (void)data;
  if (!counts->enabled || cpu >= kProcessors) return;
  struct qemu_plugin_hwaddr* where = qemu_plugin_get_hwaddr(info, address);
  if (!where || qemu_plugin_hwaddr_is_io(where)) return;
  const uint64_t physical = qemu_plugin_hwaddr_phys_addr(where);
  const unsigned kernel = address >> 63;
  const unsigned slow = physical >= counts->slow_begin && physical < counts->slow_end;
  ++counts->accesses[cpu][kernel][slow];
  const uint64_t line = physical >> kLineBits;
  uint64_t* place = &cached[cpu][line & (kLines - 1)];
  if (*place == line + 1) return;
  *place = line + 1;
  ++counts->misses[cpu][kernel][slow];
}

static void Translated(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  const size_t number = qemu_plugin_tb_n_insns(tb);
  for (size_t i = 0; i < number; ++i) {
    // Flags 0: no registers. 3: reads and writes.
    qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, i), Accessed, 0, 3, NULL);
  }
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void* info, int argc, char** argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "counts=", 7) != 0) return 1;
  const int file = open(argv[0] + 7, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof *counts) != 0) return 1;
  counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (counts == MAP_FAILED) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, Translated);
  return 0;
}

/* A plugin for qemu-user: prints every block of the guest's code, how many instructions it has and how often it ran. The
 * prototypes are those of QEMU's plugin interface, version 1, which Debian's package has no header for. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;

#define EXPORT __attribute__((visibility("default")))

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *counter, uint64_t add);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);

EXPORT int qemu_plugin_version = 1;

typedef struct block {
    uint64_t address, executions;
    size_t instructions;
    struct block *next;
} block;

static block *blocks; /* a guest of one thread: no lock */

static void on_translate(plugin_id id, struct qemu_plugin_tb *tb) {
    (void)id;
    block *b = calloc(1, sizeof *b);
    if (b == NULL) abort();
    *b = (block){qemu_plugin_tb_vaddr(tb), 0, qemu_plugin_tb_n_insns(tb), blocks};
    blocks = b;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, 0, &b->executions, 1);
}

static void on_exit_print(plugin_id id, void *data) {
    (void)id;
    (void)data;
    for (const block *b = blocks; b != NULL; b = b->next)
        fprintf(stderr, "block %llx %zu %llu\n", (unsigned long long)b->address, b->instructions,
                (unsigned long long)b->executions);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    qemu_plugin_register_atexit_cb(id, on_exit_print, NULL);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin for qemu-user: prints every block of the guest's code, how many instructions it has and how often it ran. */
#include <stdio.h>
#include <stdlib.h>

#include "qemu_plugin.h"

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

/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin for qemu-user: counts the guest's executed instructions and prints the number when it ends. */
#include <stdio.h>

#include "qemu_plugin.h"

static uint64_t executed;

static void on_translate(plugin_id id, struct qemu_plugin_tb *block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block));
}

static void on_exit_print(plugin_id id, void *data) {
    (void)id;
    (void)data;
    fprintf(stderr, "instructions %llu\n", (unsigned long long)executed);
}

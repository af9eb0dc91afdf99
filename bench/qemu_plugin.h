/* SPDX-License-Identifier: Apache-2.0 */
/* What the plugins for qemu-user here need of QEMU's plugin interface, version 1, which Debian's package has no header
 * for. */
#ifndef QEMU_PLUGIN_H
#define QEMU_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;

#define EXPORT __attribute__((visibility("default")))

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *counter, uint64_t add);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);

EXPORT int qemu_plugin_version = 1;

/* The plugin's: a block of the guest's code was translated; the guest has ended. */
static void on_translate(plugin_id id, struct qemu_plugin_tb *tb);
static void on_exit_print(plugin_id id, void *data);

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    qemu_plugin_register_atexit_cb(id, on_exit_print, NULL);
    return 0;
}

#endif

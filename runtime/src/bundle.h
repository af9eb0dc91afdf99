/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the reader of bundles (.mxb), which trusts nothing and refuses every lie with its own verdict
 * (runtime/BUNDLE.md). bundle.c reads the container: header, section table, checksums, tensor directories.
 * bundle_sections.c reads what the sections hold. */
#ifndef MXD_BUNDLE_H
#define MXD_BUNDLE_H

#include <stdbool.h>

#include "model.h"
#include "status.h"

enum { MXD_MAX_SECTIONS = 64, MXD_TENSOR_NAME = 80 };
enum { MXD_DTYPE_F32 = 1, MXD_DTYPE_MXFP4T = 2, MXD_DTYPE_MXINT8T = 3, MXD_DTYPE_U32 = 4 };

typedef struct mxd_section {
    char name[32];
    const uint8_t *data;
    size_t len;
    uint32_t crc;
} mxd_section;

/* An entry of a tensor directory. */
typedef struct mxd_tensor {
    char name[MXD_TENSOR_NAME];
    uint32_t dtype, section;
    uint64_t rows, cols, offset, len;
} mxd_tensor;

/* A bundle while it is read. */
typedef struct mxd_bundle {
    mxd_model *model; /* map, map_len and path are set */
    mxd_error *err;
    uint32_t section_count, tensor_count;
    mxd_section sections[MXD_MAX_SECTIONS];
    mxd_tensor *tensors; /* (tensor_count) of the directory read last, by section and name; allocated */
} mxd_bundle;

/* Fill b->model from its map. Errors are the verdicts of runtime/BUNDLE.md, or MXD_ERR_MEMORY. */
mxd_status mxd_bundle_read(mxd_bundle *b);

/* Fill the error: the verdict, and the path before the message. Returns the verdict. */
mxd_status mxd_refuse(const mxd_bundle *b, mxd_status verdict, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Check header, section table and checksums, and fill b->sections. */
mxd_status mxd_bundle_read_sections(mxd_bundle *b);
/* Find a section by name: NULL, or MXD_BAD_SECTION if it is needed. */
const mxd_section *mxd_bundle_find(const mxd_bundle *b, const char *name);
mxd_status mxd_bundle_need(const mxd_bundle *b, const char *name, const mxd_section **out);
/* Replace b->tensors by the directory in section `name`, whose dtypes are at most `last_dtype`. */
mxd_status mxd_bundle_read_directory(mxd_bundle *b, const char *name, uint32_t last_dtype);
/* Find a tensor of a section: NULL if it is not there. */
const mxd_tensor *mxd_bundle_find_tensor(const mxd_bundle *b, const mxd_section *in, const char *name);
/* Set *out to the bytes of a tensor that must have this dtype and shape. */
mxd_status mxd_bundle_need_tensor(const mxd_bundle *b, const mxd_section *in, const char *name, uint32_t dtype,
                                  uint32_t rows, uint32_t cols, const uint8_t **out);
/* Whether p[n] is all zero, as reserved bytes must be. */
bool mxd_all_zero(const uint8_t *p, size_t n);

#endif

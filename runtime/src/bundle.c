/* SPDX-License-Identifier: Apache-2.0 */
/* The container: header, section table, checksums, tensor directories. */
#include "bundle.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "hash.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bundles are mapped in place: a little-endian machine is required"
#endif

enum { VERSION = 2, HEADER_BYTES = 64, ENTRY_BYTES = 64, SECTION_ALIGN = 65536, TENSOR_BYTES = 128 };

static const uint8_t MAGIC[8] = {0x89, 'M', 'X', 'B', '\r', '\n', 0x1A, '\n'};

mxd_status mxd_refuse(const mxd_bundle *b, mxd_status verdict, const char *format, ...) {
    char what[sizeof b->err->message];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return mxd_fail(b->err, verdict, "%s: %s", b->model->path, what);
}

bool mxd_all_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return false;
    return true;
}

/* Whether p[cap] is a NUL-padded name of at least one of [a-z0-9._], for tensors also [A-Z-]. */
static bool valid_name(const uint8_t *p, size_t cap, bool of_tensor) {
    size_t n = 0;
    for (; n < cap && p[n]; n++) {
        uint8_t c = p[n];
        bool ok = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                  (of_tensor && ((c >= 'A' && c <= 'Z') || c == '-'));
        if (!ok) return false;
    }
    return n > 0 && n < cap && mxd_all_zero(p + n, cap - n);
}

/* Check the header, the number of sections and the checksum of their table. */
static mxd_status check_header(const mxd_bundle *b, uint32_t *count) {
    const uint8_t *map = b->model->map;
    size_t len = b->model->map_len, shown = len < sizeof MAGIC ? len : sizeof MAGIC;
    if (len == 0 || memcmp(map, MAGIC, shown))
        return mxd_refuse(b, MXD_BAD_MAGIC, "not an mxdraft bundle (wrong magic)");
    if (len < HEADER_BYTES) return mxd_refuse(b, MXD_BAD_LENGTH, "truncated: %zu bytes, not even a header", len);
    uint32_t version = mxd_load_u32(map + 8);
    if (version != VERSION)
        return mxd_refuse(b, MXD_BAD_VERSION, "bundle version %u, this runtime reads version %d: pack it again",
                          version, VERSION);
    uint64_t claimed = mxd_load_u64(map + 16);
    if (claimed != len)
        return mxd_refuse(b, MXD_BAD_LENGTH, "%zu bytes, but the header says %llu: copy the file again", len,
                          (unsigned long long)claimed);
    *count = mxd_load_u32(map + 12);
    if (*count < 1 || *count > MXD_MAX_SECTIONS || !mxd_all_zero(map + 28, 36))
        return mxd_refuse(b, MXD_BAD_HEADER, "damaged header");
    size_t table = (size_t)*count * ENTRY_BYTES;
    if (HEADER_BYTES + table > len) return mxd_refuse(b, MXD_BAD_RANGE, "section table runs past the end of the file");
    if (mxd_crc32(map + HEADER_BYTES, table) != mxd_load_u32(map + 24))
        return mxd_refuse(b, MXD_BAD_HEADER, "section table checksum differs");
    return MXD_OK;
}

/* Append the section of table entry e, which must begin at *expected, and set that to where the next one must. */
static mxd_status read_section_entry(mxd_bundle *b, const uint8_t *e, uint64_t *expected) {
    size_t len = b->model->map_len;
    mxd_section *s = &b->sections[b->section_count];
    if (!valid_name(e, sizeof s->name, false))
        return mxd_refuse(b, MXD_BAD_NAME, "section %u has an invalid name", b->section_count);
    memcpy(s->name, e, sizeof s->name);
    if (mxd_bundle_find(b, s->name)) return mxd_refuse(b, MXD_BAD_NAME, "section '%s' appears twice", s->name);
    uint64_t offset = mxd_load_u64(e + 32), size = mxd_load_u64(e + 40);
    if (offset != *expected || size == 0 || offset > len || size > len - offset)
        return mxd_refuse(b, MXD_BAD_RANGE, "section '%s' is not where it must be", s->name);
    if (!mxd_all_zero(e + 52, 12)) return mxd_refuse(b, MXD_BAD_HEADER, "section '%s' has reserved bytes set", s->name);
    s->data = b->model->map + offset;
    s->len = (size_t)size;
    s->crc = mxd_load_u32(e + 48);
    *expected = (offset + size + SECTION_ALIGN - 1) / SECTION_ALIGN * SECTION_ALIGN;
    b->section_count++;
    return MXD_OK;
}

mxd_status mxd_bundle_read_sections(mxd_bundle *b) {
    const mxd_model *m = b->model;
    uint32_t count = 0;
    mxd_status status = check_header(b, &count);
    uint64_t expected = SECTION_ALIGN;
    for (uint32_t i = 0; i < count && !status; i++)
        status = read_section_entry(b, m->map + HEADER_BYTES + (size_t)i * ENTRY_BYTES, &expected);
    if (status) return status;
    const mxd_section *last = &b->sections[count - 1];
    if (last->data + last->len != m->map + m->map_len)
        return mxd_refuse(b, MXD_BAD_RANGE, "trailing bytes after the last section");
    for (uint32_t i = 0; i < count; i++)
        if (mxd_crc32(b->sections[i].data, b->sections[i].len) != b->sections[i].crc)
            return mxd_refuse(b, MXD_BAD_CHECKSUM, "section '%s' is damaged: copy the file again", b->sections[i].name);
    return MXD_OK;
}

const mxd_section *mxd_bundle_find(const mxd_bundle *b, const char *name) {
    for (uint32_t i = 0; i < b->section_count; i++)
        if (!strcmp(b->sections[i].name, name)) return &b->sections[i];
    return NULL;
}

mxd_status mxd_bundle_need(const mxd_bundle *b, const char *name, const mxd_section **out) {
    *out = mxd_bundle_find(b, name);
    if (!*out) return mxd_refuse(b, MXD_BAD_SECTION, "section '%s' is missing", name);
    return MXD_OK;
}

/* Return the bytes of rows x cols elements; 0 if the shape is impossible. Shapes stay far below overflow. */
static uint64_t tensor_bytes(uint32_t dtype, uint64_t rows, uint64_t cols) {
    if (rows < 1 || cols < 1 || rows > 1u << 24 || cols > 1u << 24) return 0;
    if (dtype == MXD_DTYPE_F32 || dtype == MXD_DTYPE_U32) return rows * cols * 4;
    if (cols % MXD_BLOCK) return 0;
    uint64_t blocks = (rows + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS * (cols / MXD_BLOCK);
    return blocks * (dtype == MXD_DTYPE_MXFP4T ? MXD_MXFP4_BLOCK_BYTES : MXD_MXINT8_BLOCK_BYTES);
}

static mxd_status read_tensor_entry(mxd_bundle *b, const uint8_t *e, uint32_t index, uint32_t last_dtype) {
    mxd_tensor *t = &b->tensors[index];
    if (!valid_name(e, sizeof t->name, true))
        return mxd_refuse(b, MXD_BAD_NAME, "tensor %u has an invalid name", index);
    memcpy(t->name, e, sizeof t->name);
    t->dtype = mxd_load_u32(e + 80);
    t->section = mxd_load_u32(e + 84);
    t->rows = mxd_load_u64(e + 88);
    t->cols = mxd_load_u64(e + 96);
    t->offset = mxd_load_u64(e + 104);
    t->len = mxd_load_u64(e + 112);
    if (t->dtype < MXD_DTYPE_F32 || t->dtype > last_dtype)
        return mxd_refuse(b, MXD_BAD_DTYPE, "tensor '%s' has unknown dtype %u", t->name, t->dtype);
    if (t->section >= b->section_count)
        return mxd_refuse(b, MXD_BAD_TENSOR, "tensor '%s' names section %u of %u", t->name, t->section,
                          b->section_count);
    uint64_t bytes = tensor_bytes(t->dtype, t->rows, t->cols);
    size_t room = b->sections[t->section].len;
    if (bytes == 0 || t->len != bytes || t->offset % 64 || t->offset > room || t->len > room - t->offset)
        return mxd_refuse(b, MXD_BAD_TENSOR, "tensor '%s' does not fit its shape or section", t->name);
    if (!mxd_all_zero(e + 120, 8)) return mxd_refuse(b, MXD_BAD_HEADER, "tensor '%s' has reserved bytes set", t->name);
    return MXD_OK;
}

static int by_section_and_offset(const void *a, const void *b) {
    const mxd_tensor *x = a, *y = b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return 0;
}

static int by_section_and_name(const void *a, const void *b) {
    const mxd_tensor *x = a, *y = b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    return strcmp(x->name, y->name);
}

static mxd_status check_scales(const mxd_bundle *b, const mxd_tensor *t) {
    if (t->dtype == MXD_DTYPE_F32 || t->dtype == MXD_DTYPE_U32) return MXD_OK;
    size_t stride = t->dtype == MXD_DTYPE_MXFP4T ? MXD_MXFP4_BLOCK_BYTES : MXD_MXINT8_BLOCK_BYTES;
    const uint8_t *p = b->sections[t->section].data + t->offset, *end = p + t->len;
    for (; p < end; p += stride)
        if (memchr(p, 255, MXD_TILE_ROWS))
            return mxd_refuse(b, MXD_BAD_SCALE, "tensor '%s' has an E8M0 scale of 255 (NaN)", t->name);
    return MXD_OK;
}

mxd_status mxd_bundle_read_directory(mxd_bundle *b, const char *name, uint32_t last_dtype) {
    const mxd_section *s;
    mxd_status status = mxd_bundle_need(b, name, &s);
    if (status) return status;
    if (s->len % TENSOR_BYTES || s->len / TENSOR_BYTES > 1u << 20)
        return mxd_refuse(b, MXD_BAD_TENSOR, "tensor directory has %zu bytes", s->len);
    free(b->tensors);
    b->tensor_count = (uint32_t)(s->len / TENSOR_BYTES);
    b->tensors = calloc(b->tensor_count, sizeof *b->tensors);
    if (!b->tensors) return mxd_fail(b->err, MXD_ERR_MEMORY, "out of memory reading the tensor directory");
    for (uint32_t i = 0; i < b->tensor_count; i++)
        if ((status = read_tensor_entry(b, s->data + (size_t)i * TENSOR_BYTES, i, last_dtype))) return status;

    qsort(b->tensors, b->tensor_count, sizeof *b->tensors, by_section_and_offset);
    for (uint32_t i = 1; i < b->tensor_count; i++) {
        const mxd_tensor *last = &b->tensors[i - 1], *next = &b->tensors[i];
        if (last->section == next->section && last->offset + last->len > next->offset)
            return mxd_refuse(b, MXD_BAD_TENSOR, "tensors '%s' and '%s' overlap", last->name, next->name);
    }
    qsort(b->tensors, b->tensor_count, sizeof *b->tensors, by_section_and_name);
    for (uint32_t i = 1; i < b->tensor_count; i++)
        if (!by_section_and_name(&b->tensors[i - 1], &b->tensors[i]))
            return mxd_refuse(b, MXD_BAD_NAME, "tensor '%s' appears twice", b->tensors[i].name);
    for (uint32_t i = 0; i < b->tensor_count; i++)
        if ((status = check_scales(b, &b->tensors[i]))) return status;
    return MXD_OK;
}

const mxd_tensor *mxd_bundle_find_tensor(const mxd_bundle *b, const mxd_section *in, const char *name) {
    mxd_tensor key = {.section = (uint32_t)(in - b->sections)};
    snprintf(key.name, sizeof key.name, "%s", name);
    return bsearch(&key, b->tensors, b->tensor_count, sizeof *b->tensors, by_section_and_name);
}

mxd_status mxd_bundle_need_tensor(const mxd_bundle *b, const mxd_section *in, const char *name, uint32_t dtype,
                                  uint32_t rows, uint32_t cols, const uint8_t **out) {
    const mxd_tensor *t = mxd_bundle_find_tensor(b, in, name);
    if (!t) return mxd_refuse(b, MXD_BAD_TENSOR, "tensor '%s' is missing from '%s'", name, in->name);
    if (t->dtype != dtype)
        return mxd_refuse(b, MXD_BAD_DTYPE, "tensor '%s' has dtype %u, not %u", name, t->dtype, dtype);
    if (t->rows != rows || t->cols != cols)
        return mxd_refuse(b, MXD_BAD_SHAPE, "tensor '%s' is %llu x %llu, the config asks for %u x %u", name,
                          (unsigned long long)t->rows, (unsigned long long)t->cols, rows, cols);
    *out = in->data + t->offset;
    return MXD_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "draft_log.h"

#include "internal.h"

static uint32_t source_of(uint8_t kind) {
    return kind < MXD_KIND_COPY     ? MXD_SOURCE_CALLER
           : kind < MXD_KIND_TABLE  ? MXD_SOURCE_COPY
           : kind < MXD_KIND_MODEL  ? MXD_SOURCE_TABLE
           : kind < MXD_KIND_BASE   ? MXD_SOURCE_MODEL
           : kind < MXD_KIND_FORCED ? MXD_SOURCE_BASE
                                    : MXD_SOURCE_GRAMMAR;
}

void mxd_draft_log_begin(mxd_seq *s) {
    s->drafts.count = 0;
}

mxd_proposal *mxd_draft_log_clear(mxd_seq *s) {
    s->drafts.proposal.count = 0;
    return &s->drafts.proposal;
}

void mxd_draft_log_proposed(mxd_seq *s) {
    mxd_draft_log *log = &s->drafts;
    mxd_proposal *d = &log->proposal;
    log->count = d->count;
    for (uint32_t i = 0; i < d->count; i++) {
        mxd_node *node = &d->node[i];
        node->record = (uint8_t)i;
        log->kind[i] = node->kind;
        log->records[i] = (mxd_draft_record){
            .token = node->token,
            .parent = node->parent,
            .depth = node->parent < 0 ? 0 : log->records[node->parent].depth + 1,
            .source = source_of(node->kind),
            .confidence = node->confidence,
            .history = mxd_policy_history(s->engine->policy, node->kind),
            .chance = node->path,
        };
    }
}

void mxd_draft_log_verified(mxd_seq *s) {
    mxd_draft_log *log = &s->drafts;
    for (uint32_t i = 0; i < log->proposal.count; i++) log->records[log->proposal.node[i].record].verified = 1;
}

void mxd_draft_log_chosen(const mxd_seq *s, uint32_t token) {
    const mxd_draft_log *log = &s->drafts;
    for (uint32_t i = 0; i < log->count; i++) {
        const mxd_draft_record *record = &log->records[i];
        if (record->parent >= 0 || record->verified) continue;
        mxd_observation observation = {
            .type = MXD_OBSERVED_DRAFT, .kind = log->kind[i], .accepted = record->token == token};
        mxd_tuner_report(&s->engine->tuner, &observation);
    }
}

void mxd_draft_log_committed(mxd_seq *s, size_t at, int32_t node) {
    s->drafts.drafted[at] = node >= 0;
    if (node >= 0) s->drafts.records[s->drafts.proposal.node[node].record].accepted = 1;
}

const mxd_draft_record *mxd_seq_drafts(const mxd_seq *s, size_t *n) {
    *n = s->drafts.count;
    return s->drafts.records;
}

const uint8_t *mxd_seq_drafted(const mxd_seq *s) {
    return s->drafts.drafted;
}

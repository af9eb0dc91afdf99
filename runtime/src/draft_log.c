#include "draft_log.h"

#include "internal.h"

static uint32_t source_of(uint8_t kind) {
    return kind < MXD_KIND_COPY    ? MXD_SOURCE_CALLER
           : kind < MXD_KIND_TABLE ? MXD_SOURCE_COPY
           : kind < MXD_KIND_MODEL ? MXD_SOURCE_TABLE
           : kind < MXD_KIND_BASE  ? MXD_SOURCE_MODEL
                                   : MXD_SOURCE_BASE;
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
        const mxd_draft_record *parent = d->parent[i] < 0 ? NULL : &log->records[d->parent[i]];
        d->record[i] = (uint8_t)i;
        log->kind[i] = d->kind[i];
        log->records[i] = (mxd_draft_record){
            .token = d->token[i],
            .parent = d->parent[i],
            .depth = parent ? parent->depth + 1 : 0,
            .source = source_of(d->kind[i]),
            .confidence = d->confidence[i],
            .history = mxd_policy_history(s->engine->policy, d->kind[i]),
            .chance = d->path[i],
        };
    }
}

void mxd_draft_log_verified(mxd_seq *s) {
    mxd_draft_log *log = &s->drafts;
    for (uint32_t i = 0; i < log->proposal.count; i++) log->records[log->proposal.record[i]].verified = 1;
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

void mxd_draft_log_accepted(mxd_seq *s, uint32_t node) {
    s->drafts.records[s->drafts.proposal.record[node]].accepted = 1;
}

void mxd_draft_log_committed(mxd_seq *s, size_t at, bool drafted) {
    s->drafts.drafted[at] = drafted;
}

const mxd_draft_record *mxd_seq_drafts(const mxd_seq *s, size_t *n) {
    *n = s->drafts.count;
    return s->drafts.records;
}

const uint8_t *mxd_seq_drafted(const mxd_seq *s) {
    return s->drafts.drafted;
}

#include "draft_log.h"

#include "internal.h"

static uint32_t source_of(uint8_t kind) {
    return kind < MXD_KIND_COPY    ? MXD_SOURCE_CALLER
           : kind < MXD_KIND_TABLE ? MXD_SOURCE_COPY
           : kind < MXD_KIND_MODEL ? MXD_SOURCE_TABLE
           : kind < MXD_KIND_BASE  ? MXD_SOURCE_MODEL
                                   : MXD_SOURCE_BASE;
}

void mxd_draft_log_proposed(mxd_seq *s) {
    mxd_proposal *d = &s->proposal;
    s->record_count = d->count;
    for (uint32_t i = 0; i < d->count; i++) {
        const mxd_draft_record *parent = d->parent[i] < 0 ? NULL : &s->draft_records[d->parent[i]];
        d->record[i] = (uint8_t)i;
        s->record_kind[i] = d->kind[i];
        s->draft_records[i] = (mxd_draft_record){
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
    for (uint32_t i = 0; i < s->proposal.count; i++) s->draft_records[s->proposal.record[i]].verified = 1;
}

void mxd_draft_log_chosen(const mxd_seq *s, uint32_t token) {
    for (uint32_t i = 0; i < s->record_count; i++) {
        const mxd_draft_record *record = &s->draft_records[i];
        if (record->parent >= 0 || record->verified) continue;
        mxd_observation seen = {.seen = MXD_SEEN_DRAFT, .kind = s->record_kind[i], .accepted = record->token == token};
        mxd_tuner_report(&s->engine->tuner, &seen);
    }
}

const mxd_draft_record *mxd_seq_drafts(const mxd_seq *s, size_t *n) {
    *n = s->record_count;
    return s->draft_records;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "draft_base.h"

#include "internal.h"

/* List the tokens of the proposal's likeliest chain: its first nodes on each level. Returns their number. */
static uint32_t likeliest_chain(const mxd_proposal *d, uint32_t *out) {
    uint32_t count = 0;
    int32_t last = -1;
    for (uint32_t i = 0; i < d->count; i++) {
        if (d->node[i].parent != last) continue;
        out[count++] = d->node[i].token;
        last = (int32_t)i;
    }
    return count;
}

void mxd_draft_base(mxd_engine *g, mxd_seq *s, size_t most, mxd_draft_use *use) {
    uint32_t wanted = mxd_policy_base_length(g->policy, &s->drafts.proposal, most);
    uint32_t checked[MXD_MAX_DRAFT], drafted[MXD_MAX_DRAFT], count = 0;
    uint32_t ahead = likeliest_chain(&s->drafts.proposal, checked); /* those that may follow drafted[] */
    while (count < wanted) {
        uint32_t rows = 1 + (count < ahead ? ahead - count : 0);
        if (rows > wanted - count) rows = wanted - count;
        if (rows > g->max_rows) rows = g->max_rows;
        mxd_clear_rows(g);
        for (uint32_t k = 0; k < rows; k++) {
            uint32_t token = k ? checked[count + k - 1] : count ? drafted[count - 1] : s->tokens[s->token_count - 1];
            mxd_add_row(g, s, s->token_count - 1 + count + k, token, MXD_OUTPUT_WINNER);
        }
        if (mxd_forward(g, 0, NULL)) break; /* what base precision cannot compute it does not draft */
        use->bytes += mxd_weight_bytes(g, 0);
        use->expected_s += mxd_policy_base_cost(g->policy, rows);
        for (uint32_t k = 0; k < rows; k++) {
            uint32_t token = g->outcomes[k].winner, at = count++;
            drafted[at] = token;
            if (at < ahead && checked[at] == token) continue;
            if (at < ahead) ahead = 0; /* the chain goes another way */
            break;
        }
    }
    if (count == 0) return;
    mxd_proposal *d = mxd_draft_log_clear(s);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t kind = (uint8_t)(MXD_KIND_BASE + (i < 7 ? i : 7));
        mxd_propose(g->policy, d, drafted[i], (int32_t)i - 1, kind, mxd_policy_prior(kind));
    }
}

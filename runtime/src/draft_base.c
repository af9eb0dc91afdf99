/* The base plane as a drafter for full precision: it reads half the bytes and mostly agrees. Its passes write keys and
 * values of base precision behind the committed positions; the full pass that verifies the draft computes them anew. */
#include "draft_base.h"

/* The tokens of the proposal's likeliest chain: its first nodes on each level. */
static uint32_t likeliest_chain(const mxd_proposal *d, uint32_t *out) {
    uint32_t count = 0;
    int32_t last = -1;
    for (uint32_t i = 0; i < d->count; i++)
        if (d->parent[i] == last) last = (int32_t)i, out[count++] = d->token[i];
    return count;
}

void mxd_draft_base(mxd_engine *g, mxd_seq *s, size_t most) {
    uint32_t wanted = mxd_policy_base_length(g->policy, &s->proposal, most);
    uint32_t checked[MXD_MAX_DRAFT], drafted[MXD_MAX_DRAFT], count = 0;
    uint32_t ahead = likeliest_chain(&s->proposal, checked); /* those that may follow drafted[] */
    while (count < wanted) {
        uint32_t rows = 1 + (count < ahead ? ahead - count : 0);
        if (rows > wanted - count) rows = wanted - count;
        g->row_count = g->side_used = 0;
        for (uint32_t k = 0; k < rows; k++) {
            uint32_t token = k ? checked[count + k - 1] : count ? drafted[count - 1] : s->tokens[s->token_count - 1];
            g->rows[g->row_count++] = (mxd_row){.slot = s->slot,
                                                .position = (uint32_t)s->token_count - 1 + count + k,
                                                .token = token,
                                                .wants = MXD_WANTS_WINNER};
        }
        if (mxd_forward(g, 0, NULL)) break; /* what base precision cannot compute it does not draft */
        g->draft_bytes += mxd_weight_bytes(g, 0);
        uint32_t before = count;
        for (uint32_t k = 0; k < rows; k++) {
            uint32_t token = g->outcomes[k].winner;
            drafted[count++] = token;
            if (before + k >= ahead || checked[before + k] != token) {
                if (before + k < ahead) ahead = 0; /* the chain goes another way */
                break;
            }
        }
    }
    if (count == 0) return;
    s->proposal.count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t kind = (uint8_t)(MXD_KIND_BASE + (i < 7 ? i : 7));
        mxd_propose(g->policy, &s->proposal, drafted[i], (int32_t)i - 1, kind, mxd_policy_prior(kind));
    }
}

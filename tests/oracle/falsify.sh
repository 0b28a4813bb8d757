#!/usr/bin/env bash
# Proves that kda_oracle can fail: breaks a scratch copy of the crate in one place after the other and runs the suite.
# Prints `red` or `SURVIVED` for each mutant; a survivor is a missing test, and the exit status is 1. A mutant is red
# if a test fails that does not fail without it.
# A mutant whose text is not found exactly once, or that does not compile, aborts: it would prove nothing.
#
#   ./falsify.sh            all mutants
#   ./falsify.sh NAME ..    these
set -euo pipefail

root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CARGO_TARGET_DIR=${FALSIFY_TARGET_DIR:-$root/target/falsify} # kept, so that only burn-kda is built again
profile=${FALSIFY_PROFILE:-} # e.g. --release, to share its build of the dependencies
only=("$@")
survivors=0

abort() {
    echo "ABORT: $*" >&2
    exit 2
}

cd "$root"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [[ -f $file ]]; then cp --parents "$file" "$scratch"; fi # a file deleted but not yet committed is still listed
done
cd "$scratch"
cp -r crates/burn-kda/src unbroken

build() { cargo test --quiet $profile -p burn-kda --test kda_oracle --no-run > build.log 2>&1; }

# Runs the suite and lists the tests that fail.
suite() {
    cargo test $profile -p burn-kda --test kda_oracle > suite.log 2>&1 || true
    grep -q '^test result: ' suite.log || { cat suite.log >&2; abort "the suite did not run"; }
    sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' suite.log | sort
}

# mutant NAME, then FILE OLD NEW as often as needed; each OLD must occur exactly once in crates/burn-kda/src/FILE.
mutant() {
    local name=$1
    shift
    [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $name "* ]] || return 0
    local files=()
    while (($#)); do
        local file=$1
        OLD=$2 NEW=$3 perl -e '
            my ($path) = @ARGV;
            open my $in, "<", $path or die "$path: $!\n";
            my $text = do { local $/; <$in> };
            my $count = () = $text =~ /\Q$ENV{OLD}\E/g;
            die "$path: found $count times: $ENV{OLD}\n" if $count != 1;
            $text =~ s/\Q$ENV{OLD}\E/$ENV{NEW}/;
            open my $out, ">", $path or die "$path: $!\n";
            print $out $text;
        ' "crates/burn-kda/src/$file" || abort "$name cannot be applied"
        files+=("$file")
        shift 3
    done
    build || { cat build.log >&2; abort "$name does not compile"; }
    local broken
    broken=$(suite | comm -13 <(printf '%s\n' "$already") - | wc -l)
    if ((broken == 0)); then
        printf 'SURVIVED  %s\n' "$name"
        survivors=$((survivors + 1))
    else
        printf 'red       %-45s %s tests\n' "$name" "$broken"
    fi
    for file in "${files[@]}"; do cp "unbroken/$file" "crates/burn-kda/src/$file"; done # a fresh mtime: cargo builds it again
}

build || { cat build.log >&2; abort "the crate does not compile as it is"; }
already=$(suite)
printf 'unbroken  %-45s %s tests fail\n' "(no mutant)" "$(grep -c . <<< "$already" || true)"

# The gates.
mutant exp_a_inside_the_softplus gate.rs \
    'softplus(z) * rate.neg()' 'softplus(z * rate).neg()'
mutant a_log_not_clamped gate.rs \
    '.clamp(low, high).exp()' '.clamp(low * 100.0, high * 4.0).exp()'
mutant dt_bias_per_head gate.rs \
    'bias.cast(dtype).reshape([1, 1, heads, dim])' 'bias.cast(dtype).slice_dim(0, 0..heads).reshape([1, 1, heads, 1])'
mutant sigmoid_gate_without_a_log gate.rs \
    'Some(rate) => z * rate,' 'Some(_) => z,'
mutant sigmoid_gate_ignores_the_bound gate.rs \
    'sigmoid(z) * lower_bound' 'sigmoid(z) * lower_bound.clamp(-5.0, -5.0)'
mutant write_strength_not_doubled gate.rs \
    'if allow_neg_eigval { beta * 2.0 } else { beta }' 'if allow_neg_eigval { beta * 1.0 } else { beta }'
mutant softplus_through_log_of_one_plus_exp activation.rs \
    'x.mask_fill(negative, 0.0) + decayed.log1p()' '(x.exp() + 1.0).log() + (decayed * 0.0).mask_fill(negative, 0.0)'

# The read scale.
mutant read_scale_one functions/problem.rs \
    '(head_k_dim as f64).powf(-0.5)' '(head_k_dim as f64).powf(0.0)'
mutant chunk_scales_the_state functions/chunk.rs \
    'slice_dim(1, 0..time) * scale,' 'slice_dim(1, 0..time),' \
    functions/chunk.rs \
    'reshape([batch, value_heads, key_dim, value_dim]),' 'reshape([batch, value_heads, key_dim, value_dim]) * scale,'
mutant step_scales_the_state functions/step.rs \
    '.squeeze_dim(2) * scale;' '.squeeze_dim(2);' \
    functions/step.rs \
    '(o, state)' '(o, state * scale)'

# The delta rule.
mutant chunk_erases_without_beta functions/intra.rs \
    'merge_inverse(inverse, a_kk * right_beta)' 'merge_inverse(inverse, a_kk + right_beta * 0.0)'
mutant step_erases_without_beta functions/step.rs \
    'row(v) - row(k.clone())' 'row(v) * column(beta.unsqueeze_dim(2)) - row(k.clone())' \
    functions/step.rs \
    '(error * column(beta.unsqueeze_dim(2)))' 'error'
mutant step_decays_after_the_write functions/step.rs \
    'let state = Decay::new(column(g.clone()), column(g.exp())).apply(state);' 'let decay = Decay::new(column(g.clone()), column(g.exp()));' \
    functions/step.rs \
    '* (error * column(beta.unsqueeze_dim(2)));' '* (error * column(beta.unsqueeze_dim(2)));
    let state = decay.apply(state);'
mutant chunk_first_row_does_not_decay functions/intra.rs \
    'qk * decay.clone().unsqueeze_dim(0)' 'qk + decay.clone().unsqueeze_dim(0) * 0.0'
mutant chunk_write_does_not_decay functions/intra.rs \
    'keys * (over_right * even.clone()' 'keys * (over_right.ones_like() * even.clone()'
mutant chunk_state_does_not_decay functions/chunk.rs \
    'intra.decay.slice(of_chunk.clone()).apply(state) + written' 'state + written'
mutant decay_as_a_quotient_of_exponentials functions/intra.rs \
    'log_decay.clone().exp().mask_where(log_decay.clone().lower_elem(-1.0), product);' '((log_decay.clone() * 2.0).exp() + product * 0.0) / log_decay.clone().exp();'
mutant inverse_without_its_left_factor functions/intra.rs \
    'odd.matmul(a).matmul(even).neg()' '(odd.matmul(a) + even * 0.0).neg()'
mutant inverse_to_first_order functions/intra.rs \
    'odd.matmul(a).matmul(even).neg()' '(a + (odd + even) * 0.0).neg()'

# Layouts.
mutant state_v_first functions/chunk.rs \
    'state.reshape([lanes, key_dim, value_dim])' 'state.reshape([lanes, value_dim, key_dim]).swap_dims(1, 2)'
mutant chunk_tiles_grouped_heads functions/chunk.rs \
    'x.unsqueeze_dim::<4>(1).expand([blocks, group, chunk, dim]).reshape([blocks * group, chunk, dim])' \
    'x.reshape([blocks / heads, 1, heads, chunk * dim]).expand([blocks / heads, group, heads, chunk * dim]).reshape([blocks * group, chunk, dim])'
mutant recurrence_tiles_grouped_heads functions/recurrent.rs \
    'x.unsqueeze_dim::<5>(3).expand([batch, time, heads, group, key_dim])' 'x.unsqueeze_dim::<5>(2).expand([batch, time, group, heads, key_dim])'
mutant padding_not_inert functions/packed.rs \
    'Tensor::zeros(shape' 'Tensor::ones(shape'
mutant packed_states_in_the_wrong_place functions/packed.rs \
    'states.clone().slice_dim(0, n..n + 1)' 'states.clone().slice_dim(0, 0..n + 1).slice_dim(0, 0..1)'
mutant empty_sequence_forgets_the_state functions/problem.rs \
    'state.unwrap_or_else(zeros)' 'state.map(|state| state * 0.0).unwrap_or_else(zeros)'

# Norms and convolution.
mutant l2_eps_outside_the_root functions/norm.rs \
    '(x.clone().square().sum_dim(D - 1) + L2_EPS).sqrt()' 'x.clone().square().sum_dim(D - 1).sqrt() + L2_EPS'
mutant rms_eps_outside_the_root functions/norm.rs \
    '(1.0 / width as f64) + eps).sqrt()' '(1.0 / width as f64)).sqrt() + eps'
mutant norm_gated_by_silu functions/norm.rs \
    'sigmoid(gate.cast(wide))' 'sigmoid(gate.clone().cast(wide)) * gate.cast(wide)'
mutant taps_reversed functions/conv.rs \
    'slice_dim(0, j..j + 1).reshape([1, 1, channels])' 'slice_dim(0, width - 1 - j..width - j).reshape([1, 1, channels])'
mutant conv_state_starts_too_late functions/conv.rs \
    'inputs.slice_dim(1, time..time + width - 1)' 'inputs.slice_dim(1, 0..width - 1)'
mutant convolution_without_silu functions/conv.rs \
    'y: silu(sum).cast(dtype)' 'y: (silu(sum.clone()) * 0.0 + sum).cast(dtype)'

# The layer.
mutant layer_does_not_normalise_queries module/kda.rs \
    'q: l2_normalize(heads(q, self.num_heads)),' 'q: heads(q, self.num_heads),'
mutant layer_does_not_normalise_keys module/kda.rs \
    'k: l2_normalize(heads(k, self.num_heads)),' 'k: heads(k, self.num_heads),'
mutant layer_swaps_query_and_key_states module/kda.rs \
    'Some(ConvState { q: q.state, k: k.state, v: v.state })' 'Some(ConvState { q: k.state, k: q.state, v: v.state })'
mutant layer_forgets_between_calls module/kda.rs \
    'initial_state: recurrent,' 'initial_state: recurrent.map(|state| state * 0.0),'
((survivors == 0)) || { echo "$survivors survived"; exit 1; }

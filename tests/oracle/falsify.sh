#!/usr/bin/env bash
# Proves that kda_oracle, and for its room checkpoint, can fail: breaks a scratch copy of the crate in one place after
# the other and runs the suite. The kernels for accelerators are broken under tests/backends.rs instead, on a Vulkan
# device in software.
# Prints `red` or `SURVIVED` for each mutant; a survivor is a missing test, and the exit status is 1. A mutant is red
# if a test fails that does not fail without it.
# A mutant whose text is not found exactly once, or that does not compile, aborts: it would prove nothing.
#
#   ./falsify.sh            all mutants
#   ./falsify.sh NAME ..    these
set -euo pipefail

root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
scratch=$(mktemp -d)
export CARGO_TARGET_DIR=${FALSIFY_TARGET_DIR:-$root/target/falsify} # kept, so that only burn-kda is built again
profile=${FALSIFY_PROFILE:-} # e.g. --release, to share its build of the dependencies
# Cargo takes the last mutant for the crate of any checkout with older files, so its build must not stay.
trap 'cargo clean --quiet $profile -p burn-kda || true; rm -rf "$scratch"' EXIT
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

# Where the tests are: `lib` or a file of tests/.
place() { if [[ $1 == lib ]]; then echo --lib; else echo --test "$1"; fi; }

build() { cargo test --quiet $profile -p burn-kda $(place "$1") --no-run > build.log 2>&1; }

features=${FALSIFY_FEATURES:-std,autodiff,webgpu}
build_kernels() { .ci/kernels --quiet --features $features --test backends --no-run > build.log 2>&1; }

# The tests of tests/backends.rs that fail, of those named.
kernels() {
    .ci/kernels --features $features --test backends -- "$@" > suite.log 2>&1 || true
    grep -q '^test result: ' suite.log || { cat suite.log >&2; abort "the suite did not run"; }
    sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' suite.log | sort
}
# Of the chunk form on tensor cores, of both, and of the others.
tensor_cores() { BURN_KDA_TENSOR_CORES=imitated kernels half::imitated_at; }
all_kernels() { { float_kernels; tensor_cores; } | sort; }
layer_kernels() { kernels layer::sizes_and_strides layer::decay_gates layer::layers_at_once layer::gradients_of_layers; }
float_kernels() { kernels packed_sequences long_sequences_do_not_drift strided_inputs gradients_of_wide_keys; }

# Runs a suite and lists the tests that fail; not those that are the suite again in other modes.
suite() {
    cargo test $profile -p burn-kda $(place "$1") -- --skip the_plain_algorithm --skip older_machines > suite.log 2>&1 || true
    grep -q '^test result: ' suite.log || { cat suite.log >&2; abort "the suite did not run"; }
    sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' suite.log | sort
}

declare -A already # What fails without a mutant, by the way to run.
know() {
    $build || { cat build.log >&2; abort "the crate does not compile as it is"; }
    already[$run]=$($run)
    printf 'unbroken  %-45s %s tests fail\n' "($run)" "$(grep -c . <<< "${already[$run]}" || true)"
}

in_plain() { BURN_KDA_PLAIN=1 "$@"; }
on_older() { BURN_KDA_SIMD=none "$@"; }

# mutant NAME, then FILE OLD NEW as often as needed; each OLD must occur exactly once in crates/burn-kda/src/FILE.
# `suite=NAME mutant ..` is for those that another suite than kda_oracle sees. In native/layer/, it is the crate's own, which
# compares with tensor operations. In plain/, it runs without the kernels: `BURN_KDA_PLAIN`; in native/work.rs, as on a
# machine without vectors: `BURN_KDA_SIMD`, as after `on=on_older`; in checkpoint/, it is that of checkpoints.
mutant() {
    local name=$1 build="build ${suite:-kda_oracle}" run="${on:+$on }suite ${suite:-kda_oracle}"
    shift
    case $1 in
        plain/*) run="in_plain suite kda_oracle" ;;
        native/work.rs) run="on_older suite kda_oracle" ;;
        checkpoint/*) build="build checkpoint" run="suite checkpoint" ;;
        native/layer/*) build="build lib" run="suite lib" ;;
        kernel/chunk/*) build=build_kernels run=tensor_cores ;;
        kernel/layer/*) build=build_kernels run=layer_kernels ;;
        kernel/element.rs) build=build_kernels run=all_kernels ;;
        kernel/*) build=build_kernels run=float_kernels ;;
    esac
    [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $name "* ]] || return 0
    [[ -n ${already[$run]+known} ]] || know
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
    $build || { cat build.log >&2; abort "$name does not compile"; }
    local broken
    broken=$($run | comm -13 <(printf '%s\n' "${already[$run]}") - | wc -l)
    if ((broken == 0)); then
        printf 'SURVIVED  %s\n' "$name"
        survivors=$((survivors + 1))
    else
        printf 'red       %-45s %s tests\n' "$name" "$broken"
    fi
    for file in "${files[@]}"; do cp "unbroken/$file" "crates/burn-kda/src/$file"; done # a fresh mtime: cargo builds it again
}


# The gates.
mutant exp_a_inside_the_softplus plain/layer.rs \
    'times(softplus(z), rate).neg()' 'softplus(times(z, rate)).neg()'
mutant a_log_not_clamped plain/layer.rs \
    '.clamp(low, high).exp()' '.clamp(low * 100.0, high * 4.0).exp()'
mutant dt_bias_per_head plain/layer.rs \
    'bias.cast(dtype).reshape([1, 1, heads, dim])' 'bias.cast(dtype).slice_dim(0, 0..heads).reshape([1, 1, heads, 1])'
mutant sigmoid_gate_without_a_log plain/layer.rs \
    'sigmoid(times(z, rate)) *' 'sigmoid(times(z, rate.filter(|_| false))) *'
mutant sigmoid_gate_ignores_the_bound plain/layer.rs \
    'sigmoid(times(z, rate)) * lower_bound' 'sigmoid(times(z, rate)) * lower_bound.clamp(-5.0, -5.0)'
mutant gate_gradient_of_a_clamped_a_log plain/layer.rs \
    '.mask_fill(clamped, 0.0)' '.mask_fill(clamped, 1.0)'
mutant gate_gradient_of_the_rate_alone plain/layer.rs \
    'sum_dims(&[0, 1, 3]) * rate' 'sum_dims(&[0, 1, 3]) * (rate * 0.0 + 1.0)'
mutant write_strength_not_doubled gate.rs \
    'if allow_neg_eigval { 2.0 } else { 1.0 }' 'if allow_neg_eigval { 1.0 } else { 1.0 }'
mutant softplus_through_log_of_one_plus_exp activation.rs \
    'x.mask_fill(negative, 0.0) + log1p(decayed)' '(x.exp() + 1.0).log() + (decayed * 0.0).mask_fill(negative, 0.0)'
mutant sigmoid_below_zero_as_a_difference activation.rs \
    'decayed.detach() * constant.clone() + (constant - upper.clone())' 'upper.clone().neg() + 1.0 + (decayed + constant).detach() * 0.0'
mutant sigmoid_below_zero_without_its_gradient activation.rs \
    '(constant - upper.clone())' '(constant - upper.clone()).detach()'

# The read scale.
mutant read_scale_one functions/problem.rs \
    '(head_k_dim as f64).powf(-0.5)' '(head_k_dim as f64).powf(0.0)'
mutant chunk_scales_the_state plain/forward.rs \
    'slice_dim(1, 0..time) * scale)' 'slice_dim(1, 0..time))' \
    plain/forward.rs \
    'reshape([batch, value_heads, key_dim, value_dim]),' 'reshape([batch, value_heads, key_dim, value_dim]) * scale,'
mutant recurrence_scales_the_state plain/recurrence.rs \
    '.swap_dims(1, 2) * scale);' '.swap_dims(1, 2));' \
    plain/recurrence.rs \
    'final_state: state }' 'final_state: state * scale }'

# The delta rule.
mutant chunk_erases_without_beta plain/intra.rs \
    'between.clone().slice_dim(0, 1..2) * right_beta' 'between.clone().slice_dim(0, 1..2) + right_beta * 0.0'
mutant recurrence_erases_without_beta plain/recurrence.rs \
    'row(&v, t) - row(&k, t)' 'row(&v, t) * column(&beta, t) - row(&k, t)' \
    plain/recurrence.rs \
    '(error * column(&beta, t))' 'error'
mutant recurrence_decays_after_the_write plain/recurrence.rs \
    'state = Decay::new(g.clone(), g.exp()).apply(state);' 'let decay = Decay::new(g.clone(), g.exp());' \
    plain/recurrence.rs \
    '* (error * column(&beta, t));' '* (error * column(&beta, t));
        state = decay.apply(state);'
mutant chunk_first_row_does_not_decay plain/intra.rs \
    'qk * decay.clone().unsqueeze_dim(0)' 'qk + decay.clone().unsqueeze_dim::<4>(0) * 0.0'
mutant chunk_write_does_not_decay plain/intra.rs \
    'keys * (over_right * even.clone()' 'keys * (over_right.ones_like() * even.clone()'
mutant chunk_state_does_not_decay plain/forward.rs \
    'chunk.decay.clone().apply(state) + written' 'state + written'
mutant decay_as_a_quotient_of_exponentials plain/intra.rs \
    'log_decay.clone().exp().mask_where(log_decay.clone().lower_elem(-1.0), product);' '((log_decay.clone() * 2.0).exp() + product * 0.0) / log_decay.clone().exp();'
mutant inverse_without_its_left_factor plain/intra.rs \
    'odd.matmul(a).matmul(even).neg()' '(odd.matmul(a) + even * 0.0).neg()'
mutant chunks_of_64_rows plain/tiles.rs \
    'const EXACT_ROWS: usize = 16;' 'const EXACT_ROWS: usize = 64;'
mutant inverse_to_first_order plain/intra.rs \
    'odd.matmul(a).matmul(even).neg()' '(a + (odd + even) * 0.0).neg()'

# The gradients of the delta rule: the backward pass is written by hand, and has an error of its own for every term.
mutant output_cotangent_not_scaled plain/backward.rs \
    'Some(d_o) => d_o * scale,' 'Some(d_o) => d_o,'
mutant output_cotangent_ignored backends/autodiff.rs \
    'let cotangents = std::array::from_fn(|_| all.next().flatten());' \
    'let cotangents = std::array::from_fn(|n| all.next().flatten().filter(|_| M == 1 || n > 0));'
mutant final_state_cotangent_ignored backends/autodiff.rs \
    'let cotangents = std::array::from_fn(|_| all.next().flatten());' \
    'let cotangents = std::array::from_fn(|n| all.next().flatten().filter(|_| n == 0));'
mutant final_state_adds_to_the_output_cotangent backends/autodiff.rs \
    'B::float_zeros(shape, &cotangent.device(), dtype.into())' \
    'B::float_ones(shape, &cotangent.device(), dtype.into())'
mutant initial_state_gradient_dropped backends/autodiff.rs \
    'beta, initial_state: initial }' \
    'beta, initial_state: initial && false }'
mutant saved_queries_and_keys_swapped backends/autodiff.rs \
    'let [q, k, v, g, beta] = [q, k, v, g, beta].map(given);
        let inputs' \
    'let [k, q, v, g, beta] = [q, k, v, g, beta].map(given);
        let inputs'
mutant gradients_of_queries_and_keys_swapped backends/autodiff.rs \
    '[q, k, v, g, beta, initial_state].map(MaybeTensor::into_option)' \
    '[k, q, v, g, beta, initial_state].map(MaybeTensor::into_option)'
mutant state_cotangent_does_not_decay plain/backward.rs \
    'chunk.decay.apply(d_after) + d_before' 'd_after + d_before'
mutant state_cotangent_without_the_queries plain/backward.rs \
    'let d_before = by_q + by_k;' 'let d_before = by_q * 0.0 + by_k;'
mutant state_cotangent_without_the_predictions plain/backward.rs \
    'let d_before = by_q + by_k;' 'let d_before = by_q + by_k * 0.0;'
mutant predictions_add_to_the_error plain/backward.rs \
    'vec![d_o, d_error.neg()]' 'vec![d_o, d_error]'
mutant writes_without_the_outputs_of_their_chunk plain/backward.rs \
    'chunk.scores_qk.swap_dims(1, 2).matmul(d_o.clone());' 'chunk.scores_qk.swap_dims(1, 2).matmul(d_o.clone()) * 0.0;'
mutant writes_without_the_state_after_the_chunk plain/backward.rs \
    'd_write + chunk.k_to_end.clone()' 'd_write + (chunk.k_to_end.clone() * 0.0)'
mutant solve_forwards_in_the_backward_pass plain/backward.rs \
    'chunk.inverse.swap_dims(1, 2).matmul(d_write)' 'chunk.inverse.matmul(d_write)'
mutant dv_without_beta plain/backward.rs \
    'd_solve.clone() * chunk.beta' 'd_solve.clone() + chunk.beta * 0.0'
mutant dbeta_times_beta plain/backward.rs \
    '(all(|step| &step.d_solve) * left)' '(all(|step| &step.d_error) * left)'
mutant dbeta_without_what_earlier_writes_took plain/backward.rs \
    'intra.taken_by(write.clone());' 'intra.taken_by(write.clone()) * 0.0;'
mutant dq_and_dk_without_the_state plain/backward.rs \
    'd_reads.clone().matmul(before.clone()' '(d_reads.clone() * 0.0).matmul(before.clone()'
mutant dq_without_its_own_token plain/intra.rs \
    'dq + k * diagonal.clone()' 'dq + k * diagonal.clone() * 0.0'
mutant dk_without_its_own_token plain/intra.rs \
    '+ q * diagonal;' '+ q * diagonal * 0.0;'
mutant dk_without_the_state_after_the_chunk plain/intra.rs \
    'dk + k_to_end.reshape([m, c, dim])' 'dk + k_to_end.reshape([m, c, dim]) * 0.0'
mutant dk_without_the_queries_that_read_it plain/intra.rs \
    '(d_rows, by_q + by_k)' '(d_rows, by_q * 0.0 + by_k)'
mutant dk_without_the_keys_that_erase_it plain/intra.rs \
    '(d_rows, by_q + by_k)' '(d_rows, by_q + by_k * 0.0)'
mutant row_cotangents_not_decayed_over_the_left_block plain/intra.rs \
    '* over_left.unsqueeze_dim(0);' '+ over_left.unsqueeze_dim::<4>(0) * 0.0;'
mutant key_cotangents_not_decayed_over_the_right_block plain/intra.rs \
    'slice_dim(1, left.clone()) * over_right;' 'slice_dim(1, left.clone()) + over_right * 0.0;'
mutant dg_without_its_own_row plain/intra.rs \
    'log_decay.reshape([m, c, dim]) + (by_q + by_k)' 'log_decay.reshape([m, c, dim]) + (by_q + by_k) * 0.0'
mutant dg_without_the_later_rows plain/intra.rs \
    'parent.clone() + d_left' 'parent.clone() + d_left * 0.0'
mutant dg_without_the_earlier_keys plain/intra.rs \
    'parent + d_right' 'parent + d_right * 0.0'
mutant dg_without_the_decay_of_the_state plain/backward.rs \
    '* chunk.decay.clone().exp_g())' '* 0.0)'
mutant dg_of_the_state_without_its_decay plain/backward.rs \
    '* chunk.decay.clone().exp_g())' '* 1.0)'
mutant gradients_in_chunks_of_16_rows plain/backward.rs \
    'const GRADIENT_ROWS: usize = 8;' 'const GRADIENT_ROWS: usize = 16;'
mutant kept_states_off_by_one_segment plain/backward.rs \
    'slice_dim(0, n - 1..n)' 'slice_dim(0, n.max(2) - 2..n.max(2) - 1)'
mutant segments_start_without_a_state plain/backward.rs \
    'slice_dim(0, n - 1..n).squeeze_dim(0)' 'slice_dim(0, n - 1..n).squeeze_dim(0) * 0.0'
mutant recurrence_without_states_between_segments plain/backward.rs \
    'scale, chunk_size, true).1' 'scale, chunk_size, false).1'
mutant recomputed_states_forget_the_initial_one plain/backward.rs \
    'chunk_forward(input.clone(), initial_state.clone(), scale' 'chunk_forward(input.clone(), initial_state.clone().map(|state| state * 0.0), scale'
mutant gradients_of_segments_in_reverse plain/backward.rs \
    'segments.reverse();' ''
mutant tiles_share_the_first_initial_state plain/forward.rs \
    'Some(state.clone().slice_dim(0, lanes))' 'Some(state.clone().slice_dim(0, 0..lanes.len()))'
mutant tiles_share_the_first_state_cotangent plain/backward.rs \
    'd_state.slice_dim(0, lanes)' 'd_state.slice_dim(0, 0..lanes.len())'
mutant tiles_share_the_first_kept_state plain/backward.rs \
    'state.slice_dim(0, lanes.clone())' 'state.slice_dim(0, 0..lanes.len())'

# The kernels, forward.
mutant native_read_not_scaled native/chunk.rs \
    'T::vector_mul(simd, q, scale_all)' 'q'
mutant native_own_read_not_scaled native/chunk.rs \
    'self.see[n][n] = scale * ' 'self.see[n][n] = '
mutant native_erases_without_beta native/chunk.rs \
    'write[i] = T::vector_mul(simd, T::splat(simd, self.beta[i]), error);' 'write[i] = error;'
mutant native_erases_earlier_tokens_without_beta native/chunk.rs \
    '(self.meet[n][j], self.erase[n][j]) = (-by_key, -beta * by_key);
                    self.see[n][j] = scale * by_query;
                    j += 1;' '(self.meet[n][j], self.erase[n][j]) = (-by_key, -by_key);
                    self.see[n][j] = scale * by_query;
                    j += 1;'
mutant native_step_erases_without_beta native/step.rs \
    'T::vector_mul(simd, beta, T::vector_sub(simd, u[m], predicted[m]))' 'T::vector_sub(simd, T::vector_mul(simd, beta, u[m]), predicted[m])'
mutant native_predicts_from_the_undecayed_state native/chunk.rs \
    'by_key[at] = T::vector_mul(simd, decay, k);' 'by_key[at] = k;'
mutant native_reads_the_undecayed_state native/chunk.rs \
    'T::vector_mul(simd, decay, T::vector_mul(simd, q, scale_all))' 'T::vector_mul(simd, q, scale_all)'
mutant native_reads_before_the_write native/chunk.rs \
    'scale * T::total(simd, seen[n]);' 'T::zero() * T::total(simd, seen[n]);'
mutant native_keys_do_not_decay_within_a_chunk native/chunk.rs \
    'let x = T::vector_mul(simd, rows[n][c], a);' 'let (x, _) = (rows[n][c], a);'
mutant native_state_does_not_decay native/tile.rs \
    'tile[r] = new[r].add::<S, T>(simd, decay[r], tile[r]);' 'tile[r] = new[r].add::<S, T>(simd, decay[r] * T::zero() + T::one(), tile[r]);'
mutant native_step_does_not_decay native/step.rs \
    'T::vector_mul_add(simd, decay, row[m], write)' 'T::vector_mul_add(simd, decay, T::splat(simd, T::zero()), T::vector_add(simd, row[m], write))'
mutant native_step_takes_the_first_columns_for_the_others native/step.rs \
    'let row = &T::vectors::<S>(row)[first..][..M];' 'let row = &T::vectors::<S>(row)[first * 0..][..M];'
mutant native_decays_rounded_each_alone native/real.rs \
    '[simd.mul_f32s(got, power), carry]' '[simd.mul_f32s(got, power), simd.sub_f32s(carry, carry)]'
suite=lib mutant native_rounding_of_a_decay_stays_with_its_token native/chunk.rs \
    '= T::decay::<S, FMA>(simd, g, carry_within);' '= T::decay::<S, FMA>(simd, g, T::vector_sub(simd, carry_within, carry_within));'
on=on_older mutant native_multiply_adds_rounded_twice native/real.rs \
    '*c = (f64::from(a) * f64::from(b) + f64::from(*c)) as f32;' '*c = a * b + *c;'
mutant native_sums_over_every_other_column native/real.rs \
    '*pairs = [a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]];' '*pairs = [a[0], a[2], b[0], b[2]];'
suite=gradients mutant native_rounding_of_a_sum_of_decays_left_out native/chunk.rs \
    'T::vector_add(simd, rest, error)' 'T::vector_mul(simd, rest, error)'
mutant native_rest_of_an_infinite_sum native/real.rs \
    'simd.select_f32s(simd.less_than_f32s(simd.splat_f32s(LEAST), g), rest, simd.splat_f32s(0.0))' '{ let _ = g; rest }'
mutant native_kept_states_overwrite_the_first native/task.rs \
    'kept.index_axis_mut(Axis(0), start / KEEP_EVERY - 1)' 'kept.index_axis_mut(Axis(0), 0)'
mutant native_tiles_grouped_heads native/forward.rs \
    'inputs.q.slice(s![b, .., hv / group, ..])' 'inputs.q.slice(s![b, .., hv % heads, ..])' \
    native/forward.rs \
    'inputs.k.slice(s![b, .., hv / group, ..])' 'inputs.k.slice(s![b, .., hv % heads, ..])'
mutant native_step_tiles_grouped_heads native/step.rs \
    'inputs.q.slice(s![b, 0, hv / group, ..])' 'inputs.q.slice(s![b, 0, hv % heads, ..])' \
    native/step.rs \
    'inputs.k.slice(s![b, 0, hv / group, ..])' 'inputs.k.slice(s![b, 0, hv % heads, ..])'
mutant native_batch_starts_from_its_first_state native/forward.rs \
    'state.slice(s![b, hv, .., part])' 'state.slice(s![0, hv, .., part])'

# The kernels, backward.
mutant native_output_cotangent_not_scaled native/adjoint.rs \
    '*of_pair = self.scale * *of_pair' '{ let _ = of_pair; }'
mutant native_dq_without_its_own_token native/adjoint.rs \
    'dq[i] = fma(simd, all(self.of_pairs[i][CHUNK + i]), k[i], dq[i]);' ''
mutant native_dq_without_the_state_before native/adjoint.rs \
    'mul(simd, product, d_query[i].0[m])' 'mul(simd, zero, d_query[i].0[m])'
mutant native_dk_without_the_prediction native/adjoint.rs \
    'dk[i] = mul(simd, product, d_key[i].0[m]);' 'dk[i] = mul(simd, zero, d_key[i].0[m]);'
mutant native_dk_without_the_write native/adjoint.rs \
    'dk[i] = T::vector_add(simd, dk[i], d_key);' 'dk[i] = T::vector_add(simd, dk[i], T::vector_sub(simd, d_key, d_key));'
mutant native_dv_without_beta native/adjoint.rs \
    'dv[i * count + m] = error;' 'dv[i * count + m] = sum[i];'
mutant native_dbeta_of_the_writes native/lane.rs \
    'chunk, u, errors' 'chunk, u, u'
mutant native_dg_without_the_reads native/adjoint.rs \
    'sum = fma(simd, k[i], dk[i], fma(simd, q[i], dq[i], sum));' 'sum = fma(simd, k[i], dk[i], sum);'
mutant native_dg_without_the_pairs native/adjoint.rs \
    'dg[i] = fma(simd, d_key, keys[i][j], dg[i]);' 'dg[i] = fma(simd, zero, keys[i][j], dg[i]);'
mutant native_dg_of_the_state_without_its_decay native/adjoint.rs \
    'let d_decay = T::vector_mul(simd, decay[m], d_decay[m]);' 'let d_decay = d_decay[m];'
mutant native_key_cotangent_does_not_decay native/adjoint.rs \
    'd_keys[j] = mul(simd, d_key, a[i]);' 'd_keys[j] = d_key;'
mutant native_state_cotangent_without_the_queries native/adjoint.rs \
    'update_columns(simd, Pair(decay), &self.cotangents, &reads, d_state);' \
    'update_columns(simd, Pair(decay), &self.cotangents[..CHUNK * self.height], &reads[..CHUNK], d_state);'
mutant native_state_cotangent_without_the_predictions native/adjoint.rs \
    'update_columns(simd, Pair(decay), &self.cotangents, &reads, d_state);' \
    'update_columns(simd, Pair(decay), &self.cotangents[CHUNK * self.height..], &reads[CHUNK..], d_state);'
mutant native_kept_states_off_by_one_segment native/lane.rs \
    'start / KEEP_EVERY - 1' '(start / KEEP_EVERY).max(2) - 2'
mutant native_segments_start_from_the_initial_state native/lane.rs \
    '(start > 0).then(|| self.kept' '(start > self.kept.len() + KEEP_EVERY).then(|| self.kept'
mutant native_cotangent_in_place_of_its_gradient_ignored native/lane.rs \
    'OfOutput::ForValues(d_o) => Some(d_o.view())' 'OfOutput::ForValues(_) => None'
mutant native_sums_of_the_chunk_before native/lane.rs \
    'errors);
            adjoint.reset();' 'errors);'
mutant native_pairs_of_the_chunk_before native/adjoint.rs \
    'self.pairs.numbers.fill(T::zero());' ''
mutant native_kept_errors_without_earlier_tokens native/chunk.rs \
    'error = error.add::<S, T>(simd, meet, u);' 'error = error.add::<S, T>(simd, meet * T::zero(), u);'
mutant native_errors_of_other_columns_lost native/task.rs \
    'errors[at(n)..][..2].copy_from_slice(&error)' 'errors[at(n) - 2 * i..][..2].copy_from_slice(&error)'
mutant native_recurrence_without_what_would_be_kept native/backward.rs \
    'kept = kept.or(again.as_ref().map(|kept| kept.view())).expect("kept just now");' 'again = again.map(|kept| kept.mapv(|x| x * T::zero()));
    let kept = kept.or(again.as_ref().map(|kept| kept.view())).expect("kept just now");'
mutant native_batch_shares_the_first_kept_state native/backward.rs \
    'kept.index_axis_move(Axis(0), lane)' 'kept.index_axis_move(Axis(0), lane * 0)'
mutant native_batch_shares_the_first_state_cotangent native/backward.rs \
    'd_state.slice(s![b, hv, .., ..])' 'd_state.slice(s![0, hv, .., ..])'
mutant native_gradients_of_the_first_head_of_a_group native/backward.rs \
    'grouped.sum_axis(Axis(3))' 'grouped.index_axis_move(Axis(3), 0)'
mutant native_initial_state_gradient_zero native/backward.rs \
    'initial_state: initial_state.map(|state| state.assume_init()),' 'initial_state: initial_state.map(|state| state.assume_init().mapv(|_| T::zero())),'

# Around the operator, native.
mutant native_next_conv_state_is_the_first native/layer/convolution.rs \
    'inputs.input(b, time + j, 0..channels)' 'inputs.input(b, j, 0..channels)'
mutant native_conv_state_ignored native/layer/convolution.rs \
    'None => self.state.as_ref().map(' 'None => self.state.as_ref().filter(|_| false).map('
mutant native_convolution_bias_lost native/layer/convolution.rs \
    '*z = *z + bias' '*z = *z + bias * T::zero()'
mutant native_heads_not_normalised native/layer/convolution.rs \
    'head.iter_mut().for_each(|x| *x = *x / norm);' 'head.iter_mut().for_each(|x| *x = *x / norm * norm);'
mutant native_silu_gradient_of_the_sigmoid_alone native/layer/convolution.rs \
    '*d_z * open * (T::one() + z * closed)' '*d_z * open'
mutant native_gradient_of_heads_along_themselves native/layer/convolution.rs \
    '(*cotangent - value * along) / norm' '(*cotangent - value * along * T::zero()) / norm'
mutant native_convolution_gradient_of_its_own_span native/layer/convolution.rs \
    'self.tokens.start + r < d_y.dim().1' 'self.tokens.start + r < d_y.dim().1 && r < self.tokens.len()'
mutant native_convolution_gradient_without_the_next_state native/layer/convolution.rs \
    'self.d_next.zip(kept)' 'self.d_next.filter(|_| false).zip(kept)'
mutant native_convolution_bias_gradient_of_the_last_tap native/layer/convolution.rs \
    'sums.row(past + 1)' 'sums.row(past)'
mutant native_gate_without_bias native/layer/gates.rs \
    '-(softplus::<T, FMA>(*x + bias) * rate)' '-(softplus::<T, FMA>(*x + bias * T::zero()) * rate)'
mutant native_gate_gradient_of_a_clamped_a_log native/layer/gates.rs \
    'if is_clamped {' 'if is_clamped && false {'
mutant native_saturated_gate_has_a_gradient native/layer/gates.rs \
    'if d_x == T::zero() { T::zero() } else { d_x * z }' 'd_x * z'
mutant native_gate_gradient_of_the_rate_alone native/layer/gates.rs \
    'T::from(sum).expect("a float") * parameters.rate[head]' 'T::from(sum).expect("a float")'
mutant native_norm_without_eps native/layer/norm.rs \
    '(square / dim + eps).sqrt()' '(square / dim + eps * T::zero()).sqrt()'
mutant native_norm_gradient_without_the_mean native/layer/norm.rs \
    '(*d - x * along) / rms' '(*d - x * along * T::zero()) / rms'
mutant native_output_gate_gradient_of_the_open_side native/layer/norm.rs \
    '*gate = along * weight * closed' '*gate = along * weight * open'
mutant native_sigmoid_mirrored native/layer/activation.rs \
    'if x < T::zero() { (lower, upper) } else { (upper, lower) }' '(upper, lower)'

# Layouts.
mutant state_v_first plain/forward.rs \
    'state.reshape([lanes, key_dim, value_dim])' 'state.reshape([lanes, value_dim, key_dim]).swap_dims(1, 2)'
mutant chunk_tiles_grouped_heads plain/tiles.rs \
    'x.unsqueeze_dim::<5>(2).expand([chunks, lanes, group, rows, dim])' 'x.unsqueeze_dim::<5>(1).expand([chunks, group, lanes, rows, dim])'
mutant recurrence_tiles_grouped_heads plain/recurrence.rs \
    'x.unsqueeze_dim::<5>(3).expand([batch, time, heads, group, key_dim])' 'x.unsqueeze_dim::<5>(2).expand([batch, time, group, heads, key_dim])'
mutant gradients_of_the_first_head_of_a_group plain/backward.rs \
    '.sum_dim(3).squeeze_dim(3)' '.slice_dim(3, 0..1).squeeze_dim(3)'
mutant gradients_tile_grouped_heads plain/backward.rs \
    'x.reshape([batch, time, heads, group, key_dim]).sum_dim(3).squeeze_dim(3)' 'x.reshape([batch, time, group, heads, key_dim]).sum_dim(2).squeeze_dim(2)'
mutant padding_not_inert functions/packed.rs \
    'Tensor::zeros(shape' 'Tensor::ones(shape'
mutant packed_states_in_the_wrong_place functions/packed.rs \
    'states.clone().slice_dim(0, n..n + 1)' 'states.clone().slice_dim(0, 0..n + 1).slice_dim(0, 0..1)'
mutant empty_sequence_forgets_the_state functions/problem.rs \
    'state.unwrap_or_else(zeros)' 'state.map(|state| state * 0.0).unwrap_or_else(zeros)'

# Norms and convolution.
mutant l2_eps_outside_the_root plain/layer.rs \
    '(x.clone().square().sum_dim(D - 1) + L2_EPS).sqrt()' 'x.clone().square().sum_dim(D - 1).sqrt() + L2_EPS'
mutant rms_eps_outside_the_root plain/layer.rs \
    '(1.0 / width as f64) + eps).sqrt()' '(1.0 / width as f64)).sqrt() + eps'
mutant norm_gated_by_silu plain/layer.rs \
    'sigmoid(gate.cast(wide))' 'sigmoid(gate.clone().cast(wide)) * gate.cast(wide)'
mutant norm_gradient_without_the_mean plain/layer.rs \
    'normed * along.mean_dim(3)' 'normed * along.mean_dim(3) * 0.0'
mutant taps_reversed plain/layer.rs \
    'weight.clone().slice_dim(2, j..j + 1)' 'weight.clone().flip([2]).slice_dim(2, j..j + 1)'
mutant conv_state_starts_too_late plain/layer.rs \
    'inputs.slice_dim(1, time..time + width - 1)' 'inputs.slice_dim(1, 0..width - 1)'
mutant convolution_without_silu plain/layer.rs \
    'silu(convolved(&inputs.clone().cast(wide), &weight, bias, time))' 'convolved(&inputs.clone().cast(wide), &weight, bias, time)'
mutant convolution_gradient_without_the_next_state plain/layer.rs \
    'd_next.filter(|_| past > 0)' 'd_next.filter(|_| false)'
mutant gradient_of_heads_along_themselves plain/layer.rs \
    '((d_y - y * along) / norm)' '((d_y - y * along * 0.0) / norm)'

# The layer.
mutant layer_does_not_normalise_queries module/kda.rs \
    '[(q_conv, key_dim),' '[(q_conv, None),'
mutant layer_does_not_normalise_keys module/kda.rs \
    '(k_conv, key_dim),' '(k_conv, None),'
mutant layer_swaps_query_and_key_states module/kda.rs \
    'Some(ConvState { q: q.state, k: k.state, v: v.state })' 'Some(ConvState { q: k.state, k: q.state, v: v.state })'
mutant layer_forgets_between_calls module/kda.rs \
    'initial_state: recurrent,' 'initial_state: recurrent.map(|state| state * 0.0),'

# The kernels of accelerators.
mutant kernel_state_not_decayed kernel/recurrent.rs \
    'let decayed = power * state[i];' 'let decayed = state[i];'
mutant kernel_reads_before_the_write kernel/recurrent.rs \
    'blocks[j] = fma(q, x, blocks[j]);' 'blocks[j] = fma(q, decayed, blocks[j]);'
mutant kernel_scale_lost kernel/recurrent.rs \
    'scale * sums[j]' 'sums[j]'
mutant kernel_decay_rounded_once kernel/recurrent.rs \
    'let x = decayed + fma(change, decayed, k * written[j]);' \
    'let x = fma(power + power * change, state[i], k * written[j]) + 0.0f32 * decayed;'
mutant kernel_heads_interleaved kernel/segment.rs \
    'let key_head = head / (v.shape(2) / k.shape(2));' 'let key_head = head % k.shape(2);'
mutant kernel_beta_of_contiguous_heads kernel/element.rs \
    'head * beta.stride(2)' 'head'
mutant kernel_columns_without_values kernel/plan.rs \
    '.clamp(1, Self::COLUMNS.min(wide))' '.clamp(1, Self::COLUMNS)'
mutant kernel_decay_of_pairs_misses_a_row kernel/gradients/scores.rs \
    'for s in j..i {' 'for s in j + 1..i {'
mutant kernel_dg_without_the_state kernel/gradients/scan.rs \
    'of_channel[comptime!(3 * ROWS)] += state[j] * (decayed + x);' 'of_channel[comptime!(3 * ROWS)] += 0.0f32 * state[j];'
mutant kernel_dbeta_times_beta kernel/gradients/scan.rs \
    '= d_solve * left;' '= d_error * left;'
mutant kernel_dg_without_the_keys_read kernel/gradients/inputs.rs \
    'let of_decay = of_query * queries[t] + of_key * keys[t];' 'let of_decay = of_query * queries[t];'
mutant kernel_dk_without_its_own_token kernel/gradients/inputs.rs \
    'by_key[j] += on_diagonal * queries[j];' ''

# Around the operator.
mutant layer_kernel_softplus_to_first_order kernel/layer/activation.rs \
    '(tail * square * s + s)' '(0.0f32 * tail + s)'
mutant layer_kernel_a_log_not_clamped kernel/layer/gates.rs \
    'decay(clamp(f32::cast_from(a_log[head * a_log.stride(0)]), low, high))' \
    'decay(clamp(f32::cast_from(a_log[head * a_log.stride(0)]), low, high * 4.0f32))'
mutant layer_kernel_gradient_of_a_clamped_a_log kernel/layer/gates.rs \
    'select(is_clamped, 0.0f32, d_rate * rate)' 'select(is_clamped, 1.0f32, d_rate * rate)'
mutant layer_kernel_heads_not_normalised kernel/layer/convolution.rs \
    'norm = (sums[t] + comptime!(L2_EPS as f32)).sqrt();' ''
mutant layer_kernel_next_state_is_the_last kernel/layer/convolution.rs \
    'input(x, state, batch, time + j, d, width)' 'input(x, state, batch, j, d, width)'
mutant layer_kernel_gradient_without_the_next_state kernel/layer/convolution_gradients.rs \
    'sum += kept(d_next, batch, first + t + past, time, d);' ''
mutant layer_kernel_gradient_of_heads_along_themselves kernel/layer/convolution_gradients.rs \
    '(cotangent - z * open * along)' '(cotangent - 0.0f32 * z * open * along)'
mutant layer_kernel_norm_gradient_without_the_mean kernel/layer/norm.rs \
    'write(d_o, batch, first + t, head, d, (e * weights[c] - normed * along) / rms);' \
    'write(d_o, batch, first + t, head, d, (e * weights[c] - 0.0f32 * normed * along) / rms);'

# And for tensor cores.
mutant chunk_low_parts_lost kernel/chunk/operand.rs \
    'sum = fma(low_of(a), b_high, sum);' ''
mutant chunk_tree_does_not_start_again kernel/chunk/scores.rs \
    'sum = select((row + 1) & (size - 1) == 0, 0.0f32, sum);' ''
mutant chunk_levels_overlap kernel/chunk/scores.rs \
    'if (j >> level) & 1 == 0 && i >> level == (j >> level) + 1 {' 'if (j >> level) & 1 == 0 && i >> level >= j >> level {'
mutant chunk_inverse_without_beta kernel/chunk/scores.rs \
    'work[n] = betas[left + r] * sum;' 'work[n] = sum;'
mutant chunk_inverse_of_the_diagonal_alone kernel/chunk/scores.rs \
    'for block in 1..comptime!(rows / TILE) {' 'for block in 1..1usize {'
mutant chunk_first_half_not_decayed kernel/chunk/channel.rs \
    'let mut sum = select(row == 0, 0.0f32, halves[d]);' 'let mut sum = 0.0f32 * halves[d];'
mutant chunk_second_half_not_decayed kernel/chunk/channel.rs \
    'let mut sum = select(row == 0, halves[comptime!(plan.keys()) + d], 0.0f32);' 'let mut sum = 0.0f32 * halves[d];'
mutant chunk_state_decayed_by_half kernel/chunk/matrices.rs \
    '*= decay(halves[d] + halves[keys + d]);' '*= decay(halves[d]);'
mutant chunk_states_kept_in_one_place kernel/chunk/scan.rs \
    'start / SEGMENT_TOKENS - 1, lane' '0 * start, lane'
mutant chunk_beta_lost kernel/chunk/matrices.rs \
    '* beta_of(beta, heads.0, start + j, heads.1);' '* 1.0f32;'
mutant chunk_d_errors_added kernel/chunk/back.rs \
    'error_rows.put(t, e, -d_error, plan);' 'error_rows.put(t, e, d_error, plan);'
mutant chunk_dbeta_of_whole_errors kernel/chunk/back.rs \
    ' - work[t * stride + e];
                    sum +=' ';
                    sum +='
mutant chunk_state_cotangent_not_parked kernel/chunk/back.rs \
    'state[n / values * stride + n % values] = scratch[parked + n];' 'state[n / values * stride + n % values] *= 0.0f32;'
mutant chunk_dg_without_the_state kernel/chunk/back.rs \
    'of_decay += scratch[here + d * values + e] * state[d * stride + e];' 'of_decay += 0.0f32;'
mutant chunk_dg_of_its_own_half kernel/chunk/inputs.rs \
    'across[unit] = select(first == 0, earlier, later - whole);' 'across[unit] = 0.0f32 * (earlier + later + whole);'
mutant chunk_dk_without_its_own_token kernel/chunk/inputs.rs \
    'by_key[r] += on_diagonal * queries[r];' ''
mutant chunk_dk_without_the_queries kernel/chunk/inputs.rs \
    'product(&qk, &query_rows, &mut of_key, stride, tiles, transposed, plan);' ''
mutant kernel_sums_of_one_tile kernel/element.rs \
    'for tile in 0..tiles {' 'for tile in 0..tiles.min(1) {'

# Checkpoints.
mutant checkpoint_drops_rates_past_the_last_head checkpoint/layer.rs \
    'find(|(_, value)| value.to_bits() != 0)' 'find(|(_, value)| value.is_nan())'
mutant checkpoint_ignores_other_tensors checkpoint/layer.rs \
    'entries.iter().all(|entry| entry.name != **name)' 'entries.iter().all(|entry| entry.name == **name)'
mutant checkpoint_rounds_the_decay checkpoint/layer.rs \
    'matches!(path, "a_log" | "dt_bias")' 'matches!(path, "a_log")'
mutant checkpoint_swaps_the_convolutions_of_queries_and_keys checkpoint/names.rs \
    '[("q_conv1d.weight", keys), ("k_conv1d.weight", keys),' '[("k_conv1d.weight", keys), ("q_conv1d.weight", keys),'
mutant checkpoint_swaps_the_gates_of_fla checkpoint/names.rs \
    '["f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"]' '["g_proj.0", "f_proj.1", "f_proj.0", "g_proj.1"]'
mutant checkpoint_pads_rates_with_ones checkpoint/save.rs \
    'bytes.resize(self.data_len(), 0);' 'bytes.resize(self.data_len(), 1);'
mutant checkpoint_takes_the_last_of_two_entries checkpoint/unique.rs \
    'Entry::Occupied(entry) => return Err(A::Error::custom(format_args!("`{}` twice", entry.key()))),' 'Entry::Occupied(mut entry) => drop(entry.insert(map.next_value()?)),'
mutant checkpoint_reads_files_with_a_tail checkpoint/file.rs \
    'if got != want {' 'if got < want {'
mutant checkpoint_follows_paths_out_of_the_folder checkpoint/source.rs \
    'is_some_and(|name| name == file)' 'is_some()'
mutant config_counts_kimi_layers_from_0 checkpoint/config/families.rs \
    'optional_layers(key, 1, num_layers)' 'optional_layers(key, 0, num_layers + 1)'
mutant config_ignores_the_bound_of_kimi_k3 checkpoint/config/families.rs \
    'layer.decay = decay(linear.optional_bound("gate_lower_bound")?);' 'linear.optional_bound("gate_lower_bound")?;'
mutant config_starts_glm_with_attention checkpoint/config/families.rs \
    'i % 4 != 3' 'i % 4 != 0'
mutant config_starts_groups_with_attention checkpoint/config/families.rs \
    '(i + 1) % group != 0' 'i % group != 0'
mutant config_takes_the_rotary_dim_for_the_head_dim checkpoint/config/families.rs \
    'either("linear_head_dim", "head_dim")' 'either("head_dim", "linear_head_dim")'
mutant fla_cache_without_its_newest_column checkpoint/cache.rs \
    'state.slice_dim(2, 1..width)' 'state.slice_dim(2, 0..width - 1)'
mutant fla_cache_gains_a_column_at_the_end checkpoint/cache.rs \
    'vec![oldest, past]' 'vec![past, oldest]'

((survivors == 0)) || { echo "$survivors survived"; exit 1; }

//! Every path of the crate against flash-linear-attention 0.6.0 in float64; see `tests/oracle/README.md`.
//!
//! `cargo test -p burn-kda --test kda_oracle -- --nocapture` prints the worst error of each group.

mod common;

use common::compare::Report;
use common::fixture::{self, Case, Fixture};
use common::operator::{CHUNKS, FORMS, Form, Problem};
use common::{layer, pieces, platform};

/// Tests of the operator, one per row of a fixture, and the list of rows for [`every_case_is_tested`].
macro_rules! operator_rows {
    ($($test:ident: $file:literal $row:literal,)*) => {
        const OPERATOR_ROWS: &[(&str, &str)] = &[$(($file, $row)),*];
        $(#[test] fn $test() { operator($file, $row, &FORMS) })*
    };
}

fn operator(file: &str, row: &str, forms: &[Form]) {
    let fixture = Fixture::open(file);
    let mut report = Report::new(format!("{file}/{row}"));
    for case in fixture.row(row) {
        Problem::of_fixture(&case).check(forms, &mut report);
    }
    report.finish();
}

operator_rows! {
    length_1: "lengths" "T1",
    length_2: "lengths" "T2",
    length_15_one_below_a_block: "lengths" "T15",
    length_16_one_block: "lengths" "T16",
    length_17_one_above_a_block: "lengths" "T17",
    length_63_one_below_a_chunk: "lengths" "T63",
    length_64_one_chunk: "lengths" "T64",
    length_65_one_above_a_chunk: "lengths" "T65",
    length_100: "lengths" "T100",
    length_130_two_chunks_and_two: "lengths" "T130",
    length_257_four_chunks_and_one: "lengths" "T257",
    length_1_without_a_state: "lengths" "T1_no_state",
    length_64_without_a_state: "lengths" "T64_no_state",
    length_65_without_a_state: "lengths" "T65_no_state",

    key_dim_above_value_dim: "shapes" "k_larger",
    value_dim_above_key_dim: "shapes" "v_larger",
    odd_dims: "shapes" "odd",
    prime_dims: "shapes" "prime",
    one_key_channel_and_one_value_channel: "shapes" "scalar",
    one_key_channel: "shapes" "k1",
    one_value_channel: "shapes" "v1",
    head_of_real_size: "shapes" "square",
    batch_of_two: "shapes" "batch",
    two_value_heads_per_key_head: "shapes" "gva2",
    three_value_heads_per_key_head: "shapes" "gva3",
    one_key_head_for_all: "shapes" "gva_all",

    read_scale_matches_fla_reference: "scale" "",

    mild_decay: "regimes" "mild/random",
    no_decay: "regimes" "zero/random",
    tiny_decay: "regimes" "tiny/random",
    uniform_decay: "regimes" "uniform/random",
    constant_floor_decay: "regimes" "constant5/random",
    strong_softplus_decay: "regimes" "strong/random",
    extreme_softplus_decay: "regimes" "extreme/random",
    half_the_channels_decay: "regimes" "split/random",
    spikes_of_decay: "regimes" "spikes/random",
    resets: "regimes" "reset/random",
    hard_resets: "regimes" "hard_reset/random",
    mild_decay_near_identical_keys: "regimes" "mild/near_identical",
    no_decay_near_identical_keys: "regimes" "zero/near_identical",
    tiny_decay_near_identical_keys: "regimes" "tiny/near_identical",
    uniform_decay_near_identical_keys: "regimes" "uniform/near_identical",
    constant_floor_decay_near_identical_keys: "regimes" "constant5/near_identical",
    strong_softplus_decay_near_identical_keys: "regimes" "strong/near_identical",
    extreme_softplus_decay_near_identical_keys: "regimes" "extreme/near_identical",
    half_the_channels_decay_near_identical_keys: "regimes" "split/near_identical",
    spikes_of_decay_near_identical_keys: "regimes" "spikes/near_identical",
    resets_near_identical_keys: "regimes" "reset/near_identical",
    hard_resets_near_identical_keys: "regimes" "hard_reset/near_identical",
    mild_decay_identical_keys_reflecting: "regimes" "mild/identical",
    no_decay_identical_keys_reflecting: "regimes" "zero/identical",
    tiny_decay_identical_keys_reflecting: "regimes" "tiny/identical",
    mild_decay_zero_keys: "regimes" "mild/zero_keys",
    constant_floor_decay_zero_keys: "regimes" "constant5/zero_keys",
    hard_resets_zero_keys: "regimes" "hard_reset/zero_keys",
    mild_decay_some_zero_keys: "regimes" "mild/some_zero_keys",
    no_decay_some_zero_keys: "regimes" "zero/some_zero_keys",

    packed_sequences_with_states: "packed" "state",
    packed_sequences_without_states: "packed" "no_state",
    packed_sequences_of_grouped_values: "packed" "gva",
    packed_sequences_with_hard_resets: "packed" "hard_reset",
    one_packed_sequence: "packed" "single",
}

#[test]
fn chunked_wy_applies_the_fla_read_scale() {
    operator("chunked_wy", "", &CHUNKS);
}

/// A batch too large to be worked on as one piece.
#[test]
fn large_batch_of_long_sequences() {
    let fixture = Fixture::open("lengths");
    let mut report = Report::new("lengths/T257 repeated");
    Problem::of_fixture(&fixture.case("T257")).repeated(128).check(&[Form::Chunk(16), Form::Chunk(64)], &mut report);
    report.finish();
}

/// Too large even for one chunk, from states that differ.
#[test]
fn large_batch_with_initial_states() {
    let fixture = Fixture::open("regimes");
    let mut report = Report::new("regimes/mild/random/unit repeated");
    Problem::of_fixture(&fixture.case("mild/random/unit")).repeated(300).check(&[Form::Chunk(16)], &mut report);
    report.finish();
}

/// Enough of them to be cut in time, where something of the initial state is still left.
#[test]
fn large_batch_that_remembers() {
    let fixture = Fixture::open("regimes");
    let mut report = Report::new("regimes/mild/random/unit delayed");
    let forms = [Form::Chunk(16), Form::Chunk(64), Form::Recurrent];
    Problem::of_fixture(&fixture.case("mild/random/unit")).delayed(100).repeated(40).check(&forms, &mut report);
    report.finish();
}

#[test]
fn every_case_is_tested() {
    for file in ["lengths", "shapes", "scale", "regimes", "packed"] {
        let fixture = Fixture::open(file);
        let rows = OPERATOR_ROWS.iter().filter(|(other, _)| *other == file);
        let tested: Vec<_> = rows.flat_map(|(_, row)| fixture.row(row)).map(|case| case.name).collect();
        for name in fixture.names() {
            assert_eq!(tested.iter().filter(|other| *other == name).count(), 1, "{file}/{name}: in how many rows?");
        }
    }
}

#[test]
fn every_fixture_is_the_one_the_manifest_lists() {
    let listed: Vec<_> = fixture::manifest().into_iter().map(|(name, _)| name).collect();
    assert_eq!(fixture::files().into_iter().collect::<Vec<_>>(), listed);
    for name in listed {
        fixture::read(&name);
    }
}

/// Nothing to decay, so no gradient, to the last bit.
#[test]
fn first_token_without_a_state_has_no_decay_gradient() {
    for (file, row) in [("lengths", "T65_no_state"), ("scale", "one_no_state"), ("shapes", "gva_all")] {
        let fixture = Fixture::open(file);
        let problem = Problem::of_fixture(&fixture.case(row));
        let width: usize = problem.g.shape[2..].iter().product();
        for (platform, device, dtype) in platform::platforms() {
            for form in [Form::Chunk(16), Form::Chunk(64), Form::Recurrent] {
                let gradients = problem.backward(form, &device, dtype);
                let (_, dg) = gradients.iter().find(|(name, _)| *name == "dg").unwrap();
                assert!(dg.values[..width].iter().all(|&x| x == 0.0), "{file}/{row} {platform} {form:?}");
            }
        }
    }
}

/// The gates of `decay` whose name ends with one of `endings`.
fn gates(decay: &str, endings: &[&str]) {
    let fixture = Fixture::open("gates");
    let mut report = Report::new(format!("gates/{decay}"));
    for ending in endings {
        pieces::gate(&fixture.case(&format!("{decay}_{ending}")), &mut report);
    }
    report.finish();
}

#[test]
fn kimi_linear_softplus_decay_matches_fla_reference() {
    gates("softplus", &["bias", "no_bias", "init"]);
}

#[test]
fn kimi_k3_sigmoid_decay_matches_fla_reference() {
    gates("sigmoid", &["bias", "no_bias", "other_bound"]);
}

#[test]
fn softplus_decay_over_the_whole_range() {
    gates("softplus", &["wide", "low", "high"]);
}

#[test]
fn sigmoid_decay_over_the_whole_range() {
    gates("sigmoid", &["wide", "low"]);
}

#[test]
fn sigmoid_decay_without_a_log_has_a_factor_of_one() {
    gates("sigmoid", &["no_a_log", "bare"]);
}

#[test]
fn a_log_is_clamped_before_the_exponential() {
    gates("softplus", &["clamp"]);
    gates("sigmoid", &["clamp"]);
}

macro_rules! pieces {
    ($($test:ident: $check:ident $file:literal $case:literal,)*) => {
        $(#[test] fn $test() {
            let fixture = Fixture::open($file);
            let mut report = Report::new(concat!($file, "/", $case));
            pieces::$check(&fixture.case($case), &mut report);
            report.finish();
        })*
    };
}

pieces! {
    l2_norm: l2_norm "l2norm" "ordinary",
    l2_norm_at_epsilon: l2_norm "l2norm" "at_eps",
    l2_norm_of_tiny_rows: l2_norm "l2norm" "tiny",
    l2_norm_of_large_rows: l2_norm "l2norm" "large",
    l2_norm_of_zero_rows: l2_norm "l2norm" "zero",

    gated_norm: gated_norm "norm" "ordinary",
    gated_norm_at_epsilon: gated_norm "norm" "small",
    gated_norm_of_large_rows: gated_norm "norm" "large",
    gated_norm_of_zero_rows: gated_norm "norm" "zero",

    convolution: convolution "conv" "T9",
    convolution_from_nothing: convolution "conv" "T9_fresh",
    convolution_of_one_token: convolution "conv" "T1",
    convolution_of_one_token_from_nothing: convolution "conv" "T1_fresh",
    convolution_of_two_tokens: convolution "conv" "T2",
    convolution_of_two_tokens_from_nothing: convolution "conv" "T2_fresh",
    convolution_of_three_tokens: convolution "conv" "T3",
    convolution_of_width_2: convolution "conv" "W2",
    convolution_of_width_3: convolution "conv" "W3",
}

macro_rules! layers {
    ($($case:ident),* $(,)?) => {$(
        mod $case {
            use super::*;

            fn run(check: fn(&Case, &mut Report), what: &str) {
                let fixture = Fixture::open("layer");
                let mut report = Report::new(format!("layer/{} {what}", stringify!($case)));
                check(&fixture.case(stringify!($case)), &mut report);
                report.finish();
            }

            #[test]
            fn layer_outputs_match_fla() { run(layer::check_outputs, "outputs") }

            #[test]
            fn layer_prefill_and_decode_match_fla() { run(layer::check_decode, "prefill and decode") }

            #[test]
            fn layer_gradients_match_fla() { run(layer::check_gradients, "gradients") }
        }
    )*};
}

layers!(softplus, sigmoid, softplus_neg_eigval, sigmoid_neg_eigval, gva, gva3_sigmoid, expand_v, conv3, no_conv);

/// The hand-made set of `cases.json`.
mod small_cases {
    use super::*;
    use common::small;

    macro_rules! small_cases {
        ($($name:ident),* $(,)?) => {$(#[test] fn $name() {
            let mut report = Report::new(concat!("cases/", stringify!($name)));
            small::check(stringify!($name), &mut report);
            report.finish();
        })*};
    }

    small_cases!(constant_floor, instant_forgetting, no_decay, short_tail, one_key);

    #[test]
    fn units() {
        let mut report = Report::new("cases/units");
        for (platform, device, dtype) in platform::platforms() {
            small::check_units(&platform, &device, dtype, &mut report);
        }
        report.finish();
    }
}

#[test]
fn the_plain_algorithm_passes_them_too() {
    platform::again_in_plain_operations();
}

#[test]
fn older_machines_pass_them_too() {
    platform::again_on_older_machines();
}

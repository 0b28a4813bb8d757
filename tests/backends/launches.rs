//! That the kernels run, and how often.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use burn::tensor::DType;
use cubecl::logging::{LaunchObservation, LaunchObserver};

use crate::common::operator::Form;
use crate::common::platform::devices;
use crate::common::recipe::Recipe;

/// The kernels that one thread launches: other tests run beside this one.
struct Launches(ThreadId, Mutex<Vec<&'static str>>);

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        if thread::current().id() == self.0 {
            self.1.lock().unwrap().push(kernel);
        }
    }
}

fn launches(run: impl FnOnce()) -> Vec<&'static str> {
    let launches = Arc::new(Launches(thread::current().id(), Mutex::default()));
    let observation = LaunchObservation::new(launches.clone());
    run();
    drop(observation);
    launches.1.lock().unwrap().clone()
}

/// Any number of tokens, and heads of any size.
#[test]
fn a_call_is_one_launch() {
    for (_, device) in devices() {
        if !format!("{device:?}").contains("Cube") {
            continue;
        }
        for (time, key_dim, value_dim) in [(1, 5, 3), (1, 128, 128), (100, 64, 256), (300, 256, 65)] {
            let problem = Recipe { time, key_dim, value_dim, ..Recipe::default() }.problem();
            for form in [Form::Chunk(64), Form::Recurrent] {
                let tensors = problem.constants(&device, DType::F32);
                device.sync().expect("the inputs arrive");
                let kernels = launches(|| {
                    problem.run(form, tensors);
                    device.sync().expect("the kernel runs");
                });
                assert_eq!(kernels.len(), 1, "{form:?}: {kernels:?}");
                assert!(kernels[0].contains("recurrent_kernel"), "{form:?}: {kernels:?}");
            }
        }
    }
}

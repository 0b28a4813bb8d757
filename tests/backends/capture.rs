//! That the operator is recorded as operations that any backend can replay.

use burn::backend::{Capture, Flex};
use burn::tensor::{DType, Device, Shape, TensorData, read_sync};
use burn_ir::{OperationIr, TensorIr, TensorStatus};
use burn_router::TensorInterpreter;

use crate::common::array::Array;
use crate::common::compare::Report;
use crate::common::operator::Form;
use crate::common::platform::bar;
use crate::common::recipe::Recipe;

#[test]
fn a_recorded_call_can_be_replayed() {
    let mut report = Report::new("recorded calls");
    for form in [Form::Chunk(64), Form::Recurrent, Form::Step] {
        let problem = Recipe { time: 40, key_dim: 24, value_dim: 16, ..Recipe::default() }.problem();
        let device = Device::capture();
        let recorded = device.capture_scope(|scope| {
            let output = problem.run(form, problem.constants(&device, DType::F32));
            let id = |x: &burn::tensor::Tensor<4>| x.clone().try_into_primitive::<Capture>().expect("recorded").id();
            let ids = [id(&output.o), id(&output.final_state)];
            scope.complete([], ids)
        });
        let recorded = recorded.expect("a graph");
        assert!(!recorded.graph.operations.iter().any(|x| matches!(x, OperationIr::Custom(_))));

        let mut interpreter = TensorInterpreter::<Flex>::new(Default::default());
        for (id, data) in recorded.values {
            interpreter.register_tensor_data_id(id, data);
        }
        for operation in recorded.graph.operations {
            interpreter.register_op(operation);
        }
        let results = [("o", &problem.o), ("final_state", &problem.final_state)];
        for (id, (name, want)) in recorded.graph.outputs.into_iter().zip(results) {
            let shape = Shape::from(want.shape.clone());
            let tensor = TensorIr { id, shape, status: TensorStatus::ReadOnly, dtype: DType::F32 };
            let got: TensorData = read_sync(interpreter.read_tensor_async(tensor)).expect("computed");
            let got = Array::new(want.shape.clone(), got.iter::<f64>().collect());
            report.check("replayed", format!("{form:?} {name}"), &got, want, DType::F32, bar(DType::F32));
        }
    }
    report.finish();
}

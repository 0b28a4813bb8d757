//! Numbers off any device, in f64: what fixtures hold and what results are compared as.

use burn::tensor::{DType, Device, Tensor, TensorData};

#[derive(Debug, Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Array {
    pub fn new(shape: Vec<usize>, values: Vec<f64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        Self { shape, values }
    }

    pub fn zeros(shape: Vec<usize>) -> Self {
        let len = shape.iter().product();
        Self { shape, values: vec![0.0; len] }
    }

    pub fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        let shape = tensor.dims().to_vec();
        Self { shape, values: tensor.into_data().iter::<f64>().collect() }
    }

    /// A constant on `device`.
    pub fn tensor<const D: usize>(&self, device: &Device, dtype: DType) -> Tensor<D> {
        let data = TensorData::new(self.values.clone(), self.shape.clone()).convert_dtype(dtype);
        Tensor::from_data(data, (device, dtype))
    }

    /// A leaf on the autodiff device of `device`.
    pub fn leaf<const D: usize>(&self, device: &Device, dtype: DType) -> Tensor<D> {
        self.tensor(&device.clone().autodiff(), dtype).require_grad()
    }

    /// The last two dimensions swapped: `[out, in]` to `[in, out]`, V-first states to K-first.
    pub fn transposed(&self) -> Self {
        let [.., rows, columns] = self.shape[..] else { panic!("transpose of {:?}", self.shape) };
        let mut shape = self.shape.clone();
        let rank = shape.len();
        shape.swap(rank - 2, rank - 1);
        let blocks = self.values.chunks(rows * columns);
        let swapped = blocks.flat_map(|x| (0..columns).flat_map(move |j| (0..rows).map(move |i| x[i * columns + j])));
        Self { shape, values: swapped.collect() }
    }

    /// The last axis rotated to the left.
    pub fn rotated(mut self, by: usize) -> Self {
        let width = *self.shape.last().expect("an axis");
        self.values.chunks_mut(width).for_each(|row| row.rotate_left(by));
        self
    }

    /// Arrays of one shape along a new first axis.
    pub fn stack(arrays: Vec<Self>) -> Self {
        let shape = arrays[0].shape.clone();
        assert!(arrays.iter().all(|array| array.shape == shape));
        let values = arrays.iter().flat_map(|array| array.values.iter().copied()).collect();
        Self::new([&[arrays.len()], &shape[..]].concat(), values)
    }

    /// The values of head `head` of `[B, T, heads, K]`, or of `[heads]` or `[heads * K]`.
    pub fn head(&self, head: usize, heads: usize) -> Self {
        let per_head = match self.shape[..] {
            [_, _, _, width] => width,
            [len] => len / heads,
            _ => panic!("heads of {:?}", self.shape),
        };
        let rows = self.values.chunks(heads * per_head);
        let values: Vec<_> = rows.flat_map(|row| &row[head * per_head..(head + 1) * per_head]).copied().collect();
        Self { shape: vec![values.len()], values }
    }
}

/// The gradient of `leaf`, zero where nothing reached it.
pub fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &burn::tensor::Gradients) -> Array {
    match leaf.grad(gradients) {
        Some(gradient) => Array::of(gradient),
        None => Array::zeros(leaf.dims().to_vec()),
    }
}

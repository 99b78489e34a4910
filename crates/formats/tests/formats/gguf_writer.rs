//! Writes GGUF files, right or wrong.

use baton_formats::{Array, Value};

/// A GGUF file to be; `bytes` writes it. Offsets are given out in order unless a tensor has its
/// own.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<WrittenTensor>,
    pub alignment: usize,
}

#[derive(Debug, Clone)]
pub struct WrittenTensor {
    pub name: String,
    /// ggml's order: innermost first.
    pub dims: Vec<u64>,
    /// ggml's number of the type.
    pub dtype: u32,
    pub data: Vec<u8>,
    pub offset: Option<u64>,
}

impl GgufWriter {
    pub fn new() -> Self {
        Self { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// An F32 tensor with as many bytes as its dimensions ask for.
    pub fn tensor(self, name: &str, dims: &[u64]) -> Self {
        let elements: u64 = dims.iter().product();
        self.raw_tensor(name, dims, 0, (0..elements * 4).map(|i| i as u8).collect())
    }

    pub fn raw_tensor(mut self, name: &str, dims: &[u64], dtype: u32, data: Vec<u8>) -> Self {
        self.tensors.push(WrittenTensor { name: name.to_owned(), dims: dims.to_vec(), dtype, data, offset: None });
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            write_value(&mut out, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            tensor.write_entry(&mut out, data.len() as u64);
            data.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

impl WrittenTensor {
    fn write_entry(&self, out: &mut Vec<u8>, offset: u64) {
        string(out, &self.name);
        out.extend((self.dims.len() as u32).to_le_bytes());
        self.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(self.dtype.to_le_bytes());
        out.extend(self.offset.unwrap_or(offset).to_le_bytes());
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let mut scalar = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => scalar(0, &v.to_le_bytes()),
        Value::I8(v) => scalar(1, &v.to_le_bytes()),
        Value::U16(v) => scalar(2, &v.to_le_bytes()),
        Value::I16(v) => scalar(3, &v.to_le_bytes()),
        Value::U32(v) => scalar(4, &v.to_le_bytes()),
        Value::I32(v) => scalar(5, &v.to_le_bytes()),
        Value::F32(v) => scalar(6, &v.to_le_bytes()),
        Value::Bool(v) => scalar(7, &[u8::from(*v)]),
        Value::String(v) => {
            scalar(8, &[]);
            string(out, v);
        }
        Value::Array(v) => {
            scalar(9, &[]);
            write_array(out, v);
        }
        Value::U64(v) => scalar(10, &v.to_le_bytes()),
        Value::I64(v) => scalar(11, &v.to_le_bytes()),
        Value::F64(v) => scalar(12, &v.to_le_bytes()),
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    let mut head = |kind: u32| {
        out.extend(kind.to_le_bytes());
        out.extend((array.len() as u64).to_le_bytes());
    };
    match array {
        Array::U8(v) => (head(0), out.extend(v)).1,
        Array::I8(v) => (head(1), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::U16(v) => (head(2), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::I16(v) => (head(3), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::U32(v) => (head(4), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::I32(v) => (head(5), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::F32(v) => (head(6), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::Bool(v) => (head(7), out.extend(v.iter().map(|&x| u8::from(x)))).1,
        Array::String(v) => (head(8), v.iter().for_each(|x| string(out, x))).1,
        Array::U64(v) => (head(10), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::I64(v) => (head(11), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
        Array::F64(v) => (head(12), out.extend(v.iter().flat_map(|x| x.to_le_bytes()))).1,
    }
}

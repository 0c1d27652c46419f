// node compile.mjs OUT: turns every .ksy beside this file into OUT/javascript and OUT/python, and lists the fields that the
// schemas have in OUT/schema-fields.json. Needs the npm packages kaitai-struct-compiler and js-yaml in OUT/node_modules.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";

const here = path.dirname(fileURLToPath(import.meta.url));
const out = path.resolve(process.argv[2]);
const require = createRequire(out + "/");
const compilerModule = require("kaitai-struct-compiler");
const compiler = typeof compilerModule === "function" ? new compilerModule() : compilerModule;
const yaml = require("js-yaml");

const read = (name) => yaml.load(fs.readFileSync(path.join(here, name + ".ksy"), "utf8"));
const names = fs.readdirSync(here).filter((file) => file.endsWith(".ksy")).map((file) => file.slice(0, -4)).sort();
if (names.length === 0) throw new Error("no schema found");

const fields = [];
const list = (type, schema) => {
  if (!schema.doc && !schema.seq) throw new Error(`${type} has neither doc nor fields`);
  for (const field of schema.seq ?? []) fields.push(`${type}.${field.id}`);
  for (const id of Object.keys(schema.instances ?? {})) fields.push(`${type}.${id}`);
  for (const [name, inner] of Object.entries(schema.types ?? {})) list(`${type}.${name}`, inner);
};
for (const name of names) {
  const schema = read(name);
  if (schema.meta.id !== name || !schema.doc || !schema["doc-ref"]) throw new Error(`${name}: id, doc or doc-ref is missing`);
  list(name, schema);
  for (const language of ["javascript", "python"]) {
    const files = await compiler.compile(language, read(name), { importYaml: async (imported) => read(imported) }, false);
    fs.mkdirSync(path.join(out, language), { recursive: true });
    for (const [file, text] of Object.entries(files)) fs.writeFileSync(path.join(out, language, file), text);
  }
}
fs.writeFileSync(path.join(out, "schema-fields.json"), JSON.stringify(fields.sort(), null, 1));
console.log(`${names.length} schemas, ${fields.length} fields`);
